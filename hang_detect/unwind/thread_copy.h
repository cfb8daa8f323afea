// Registers and stack of a thread of another process, copied while ptrace holds the thread.
//
// ptrace holds it for the time of the copy (tens of microseconds, plus `while_held`). Every path
// releases it; if this process is killed, the kernel does. A thread that was stopped before
// (SIGSTOP) stays stopped. The kernel restarts the system call in which the thread waits; the few
// that it does not restart (such as epoll_wait) return EINTR, as with any debugger.
//
// Threads: all calls for one process from one thread, which the kernel takes for the tracer. A
//          thread that has not stopped in time is released when the tracer thread ends.
// Errors:  none: CopiedThread::problem.
#pragma once

#include <sys/user.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hang_detect/stacks/process_memory.h"

namespace reft {

struct CopiedThread {
  int tid = 0;
  std::string name, state;  // from /proc
  user_regs_struct registers{};
  uint64_t stack_begin = 0;  // address of the first byte of `stack`
  std::vector<uint8_t> stack;
  bool gone = false;
  std::string problem;  // reason for a missing copy; empty = copied
};

// Waits until `deadline` at most for the thread to stop.
CopiedThread copyThread(int pid, int tid, ProcessMemory& memory,
                        const std::vector<MappedRange>& maps,
                        std::chrono::steady_clock::time_point deadline,
                        const std::function<void()>& while_held);

// The thread ids of a process, its first thread first.
std::vector<int> tasksOf(int pid);

}  // namespace reft
