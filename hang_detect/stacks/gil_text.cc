#include "hang_detect/stacks/gil_text.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/syscall.h>

#include "hang_detect/stacks/process_memory.h"
#include "hang_detect/stacks/remote_stack.h"

namespace reft {

namespace {

using std::chrono::milliseconds;

// Twenty times the switch interval, after which a waiting thread requests the GIL.
constexpr milliseconds kBetweenLooks{100};
// Processor time within which bytecode notices such a request.
constexpr uint64_t kEnoughNs = 20'000'000;
// A thread that waits for the GIL wakes for a moment every 5 ms.
constexpr int kTries = 10;
constexpr milliseconds kBetweenTries{2};
constexpr size_t kMaxWaiters = 16;

bool sleepsOn(const std::string& syscall_path, uint64_t condition) {
  for (int i = 0; i < kTries; ++i) {
    if (i > 0) {
      std::this_thread::sleep_for(kBetweenTries);
    }
    int problem = 0;
    const std::string text = readProcText(syscall_path, 512, problem);
    long number = 0;
    uint64_t address = 0;
    if (std::sscanf(text.c_str(), "%ld %" SCNx64, &number, &address) == 2 && number == SYS_futex &&
        address >= condition && address - condition < sizeof(pthread_cond_t)) {
      return true;
    }
    if (text.rfind("running", 0) != 0) {
      return false;  // it sleeps on another address, or the file cannot be read
    }
  }
  return false;
}

// State and processor time of a thread. Unknown for a thread of a container, seen from outside:
// its thread id differs there.
struct Schedule {
  char state = '?';
  uint64_t ran_ns = 0;
};

Schedule scheduleOf(int pid, uint64_t tid) {
  const std::string task = procPath(pid, "task/" + std::to_string(tid) + "/");
  int problem = 0;
  const std::string stat = readProcText(task + "stat", 512, problem);
  const size_t close = stat.rfind(')');  // the name before it may contain any character
  Schedule schedule;
  if (close != std::string::npos && close + 2 < stat.size() &&
      std::sscanf(readProcText(task + "schedstat", 128, problem).c_str(), "%" SCNu64,
                  &schedule.ran_ns) == 1) {
    schedule.state = stat[close + 2];
  }
  return schedule;
}

// True if the holder, had it executed bytecode, would have released the GIL; false if it was
// stopped or had too little processor time.
bool hadTime(const Schedule& before, const Schedule& after) {
  const bool sleeps = after.state == 'S' || after.state == 'D';
  return before.state != '?' &&
         (sleeps || (after.state == 'R' && after.ran_ns - before.ran_ns >= kEnoughNs));
}

const PythonThread* threadOf(const PythonThreads& found, uint64_t native_id) {
  const auto at = std::find_if(
      found.threads.begin(), found.threads.end(),
      [native_id](const PythonThread& thread) { return thread.native_id == native_id; });
  return at == found.threads.end() ? nullptr : &*at;
}

// The thread that keeps `waiter` from taking its GIL; nullptr: none or unknown.
const PythonThread* holderFor(const PythonThreads& found, const PythonThread& waiter) {
  const auto at = std::find_if(found.threads.begin(), found.threads.end(),
                               [&waiter](const PythonThread& thread) {
                                 return thread.holds_gil && &thread != &waiter &&
                                        thread.gil_condition == waiter.gil_condition;
                               });
  return at == found.threads.end() ? nullptr : &*at;
}

// A thread that sleeps until its GIL is free, and who held that at the time.
struct Waiter {
  const PythonThread* thread = nullptr;
  const PythonThread* holder = nullptr;
  Schedule schedule{};  // of the holder
};

// The kernel's file on what a thread of `pid` sleeps on. The main thread's is found in a container,
// too, where its thread id seen from outside differs.
std::string syscallPath(int pid, uint64_t native_id, uint64_t main_id) {
  const uint64_t tid = native_id == main_id ? static_cast<uint64_t>(pid) : native_id;
  return procPath(pid, "task/" + std::to_string(tid) + "/syscall");
}

}  // namespace

std::string gilText(int pid, PythonReader& reader, const PythonThreads& now) {
  const uint64_t main_id = ownNumber(pid, pid);
  std::vector<Waiter> waiters;
  for (const PythonThread& thread : now.threads) {
    const PythonThread* holder = thread.gil_condition != 0 && waiters.size() < kMaxWaiters
                                     ? holderFor(now, thread)
                                     : nullptr;
    if (holder != nullptr &&
        sleepsOn(syscallPath(pid, thread.native_id, main_id), thread.gil_condition)) {
      waiters.push_back({&thread, holder, scheduleOf(pid, holder->native_id)});
    }
  }
  if (!waiters.empty()) {
    std::this_thread::sleep_for(kBetweenLooks);
    const PythonThreads later = reader.all(false);
    std::erase_if(waiters, [&](const Waiter& waiter) {
      const PythonThread* self = threadOf(later, waiter.thread->native_id);
      const PythonThread* holder = self == nullptr ? nullptr : holderFor(later, *self);
      return holder == nullptr || holder->id != waiter.holder->id ||
             holder->native_id != waiter.holder->native_id ||
             holder->gil_condition != waiter.holder->gil_condition ||
             holder->gil_switches != waiter.holder->gil_switches ||
             !hadTime(waiter.schedule, scheduleOf(pid, holder->native_id)) ||
             !sleepsOn(syscallPath(pid, self->native_id, main_id), self->gil_condition);
    });
  }
  std::string text;
  char line[128];
  for (const PythonThread& thread : now.threads) {
    if (!thread.holds_gil) {
      continue;
    }
    std::snprintf(line, sizeof(line), "GIL held by 0x%016" PRIx64 "\n", thread.id);
    std::string lines = line;
    for (const Waiter& waiter : waiters) {
      if (waiter.holder == &thread) {
        std::snprintf(line, sizeof(line),
                      "GIL held by 0x%016" PRIx64 ", awaited by 0x%016" PRIx64 "\n", thread.id,
                      waiter.thread->id);
        lines = (lines.find(',') == lines.npos ? "" : lines) + line;
      }
    }
    text += lines;
  }
  return text;
}

}  // namespace reft
