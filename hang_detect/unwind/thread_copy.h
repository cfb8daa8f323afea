// What is needed to unwind a thread of another process, copied while the thread is held.
//
// A thread is held with ptrace for as long as the copy takes (tens of microseconds, and what is
// done in `while_held`), and let go on every path; if this process is killed meanwhile, the kernel
// lets it go. One that was stopped before (SIGSTOP) stays stopped. A system call that a thread
// waits in is begun again by the kernel; the few that are not (epoll_wait, for one) return EINTR,
// as with any debugger.
//
// Threads: all calls for one process from one thread: the kernel knows the tracer by it. What has
// not stopped in time is let go
//          when that thread ends.
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
  std::string name, state;  // as /proc has them
  user_regs_struct registers{};
  uint64_t stack_begin = 0;  // address of the first byte of `stack`
  std::vector<uint8_t> stack;
  bool gone = false;
  std::string problem;  // why there is nothing; empty = it is there
};

// Waits at most until `deadline` for the thread to stand still.
CopiedThread copyThread(int pid, int tid, ProcessMemory& memory,
                        const std::vector<MappedRange>& maps,
                        std::chrono::steady_clock::time_point deadline,
                        const std::function<void()>& while_held);

// The tasks of a process, its first thread first.
std::vector<int> tasksOf(int pid);

}  // namespace reft
