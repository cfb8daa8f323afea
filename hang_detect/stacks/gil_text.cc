#include "hang_detect/stacks/gil_text.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <thread>

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

const PythonThread* mainOf(const PythonThreads& found, uint64_t native_id) {
  const auto at = std::find_if(
      found.threads.begin(), found.threads.end(),
      [native_id](const PythonThread& thread) { return thread.native_id == native_id; });
  return at == found.threads.end() ? nullptr : &*at;
}

// The thread that keeps `main` from taking its GIL; nullptr: none or unknown.
const PythonThread* holderFor(const PythonThreads& found, const PythonThread& main) {
  const auto at =
      std::find_if(found.threads.begin(), found.threads.end(), [&main](const PythonThread& thread) {
        return thread.holds_gil && &thread != &main && thread.gil_condition == main.gil_condition;
      });
  return at == found.threads.end() ? nullptr : &*at;
}

}  // namespace

std::string gilText(int pid, PythonReader& reader, const PythonThreads& now) {
  const std::string syscall_path = procPath(pid, "task/" + std::to_string(pid) + "/syscall");
  const uint64_t native_id = ownNumber(pid, pid);
  const PythonThread* main = mainOf(now, native_id);
  const PythonThread* keeper = nullptr;
  if (main != nullptr && main->gil_condition != 0 && sleepsOn(syscall_path, main->gil_condition)) {
    keeper = holderFor(now, *main);
  }
  if (keeper != nullptr) {
    const Schedule before = scheduleOf(pid, keeper->native_id);
    std::this_thread::sleep_for(kBetweenLooks);
    const PythonThreads later = reader.all(false);
    const PythonThread* main_then = mainOf(later, native_id);
    const PythonThread* then = main_then == nullptr ? nullptr : holderFor(later, *main_then);
    if (then == nullptr || then->id != keeper->id || then->native_id != keeper->native_id ||
        then->gil_condition != keeper->gil_condition ||
        then->gil_switches != keeper->gil_switches ||
        !hadTime(before, scheduleOf(pid, keeper->native_id)) ||
        !sleepsOn(syscall_path, main_then->gil_condition)) {
      keeper = nullptr;
    }
  }
  std::string text;
  char line[96];
  for (const PythonThread& thread : now.threads) {
    if (!thread.holds_gil) {
      continue;
    }
    std::snprintf(line, sizeof(line), "GIL held by 0x%016" PRIx64, thread.id);
    text += line;
    if (&thread == keeper) {
      std::snprintf(line, sizeof(line), ", awaited by 0x%016" PRIx64, main->id);
      text += line;
    }
    text += '\n';
  }
  return text;
}

}  // namespace reft
