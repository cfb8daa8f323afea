#include "hang_detect/unwind/native_stacks.h"

#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hang_detect/stacks/process_memory.h"
#include "hang_detect/unwind/thread_copy.h"
#include "hang_detect/unwind/unwinder.h"

namespace reft {

namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kThreadWait{500};

// Identifies the program of a process: it changes when the process executes another one, whose
// random bytes and vdso pages lie elsewhere, and when another process gets the same pid.
std::string programOf(int pid) {
  int problem = 0;
  char link[4096];
  const ssize_t length = ::readlink(procPath(pid, "exe").c_str(), link, sizeof(link));
  const std::string stat = readProcText(procPath(pid, "stat"), 1024, problem);
  std::string started;
  size_t at = stat.rfind(')');
  for (int field = 2; at != std::string::npos && field < 22; ++field) {
    at = stat.find(' ', at + 1);
  }
  if (at != std::string::npos) {
    started = stat.substr(at + 1, stat.find(' ', at + 1) - at - 1);
  }
  return std::string(link, length > 0 ? static_cast<size_t>(length) : 0) + "\n" + started + "\n" +
         readProcText(procPath(pid, "auxv"), 4096, problem);
}

bool is32Bit(int pid) {
  int problem = 0;
  const std::string head = readProcText(procPath(pid, "exe"), 1, problem);
  return head.size() > EI_CLASS && head.compare(0, SELFMAG, ELFMAG) == 0 &&
         head[EI_CLASS] == ELFCLASS32;
}

struct Copies {
  std::vector<CopiedThread> threads;
  std::map<int, PythonThread> python;  // by thread
};

Copies copyAll(int pid, RemotePython& python, const std::vector<MappedRange>& maps,
               steady_clock::time_point deadline) {
  Copies copies;
  ProcessMemory memory(pid);
  for (const int tid : tasksOf(pid)) {
    const auto now = steady_clock::now();
    if (now >= deadline) {
      copies.threads.push_back({});
      copies.threads.back().tid = tid;
      copies.threads.back().problem = "no time was left for it";
      continue;
    }
    const uint64_t own = ownNumber(pid, tid);
    CopiedThread thread =
        copyThread(pid, tid, memory, maps, std::min(deadline, now + kThreadWait), [&] {
          if (auto frames = python.thread(own)) {
            copies.python.emplace(tid, std::move(*frames));
          }
        });
    // The thread could not be stopped, but its Python frames can be read.
    if (!thread.problem.empty() && !thread.gone) {
      if (auto frames = python.thread(own)) {
        copies.python.emplace(tid, std::move(*frames));
      }
    }
    if (!thread.gone) {
      copies.threads.push_back(std::move(thread));
    }
  }
  return copies;
}

}  // namespace

NativeStacks readNativeStacks(int pid, std::chrono::milliseconds limit) {
  NativeStacks result;
  const auto deadline = steady_clock::now() + limit;
  const std::string program = pid > 0 ? programOf(pid) : "";
  RemotePython python(pid);
  result.python = python.stacks();
  std::string& error = result.merged.error;
  int problem = 0;
  const auto maps = pid > 0 ? mapsOf(pid, problem) : std::vector<MappedRange>();
  if (!builtWithUnwinder()) {
    error =
        "this reft was built without libunwind (REFT_WITH_UNWIND), so there are no native "
        "frames";
  } else if (maps.empty()) {
    error = problem == EACCES || problem == EPERM
                ? noRightToRead(pid)
                : "process " + std::to_string(pid) +
                      " has no memory: it has ended, or is one of the kernel's";
  } else if (is32Bit(pid)) {
    error =
        "process " + std::to_string(pid) + " is a program of 32 bits; only 64 bits can be unwound";
  }
  if (!error.empty()) {
    return result;
  }
  Copies copies;
  // The kernel releases every thread that this one still holds when it ends.
  std::thread([&] { copies = copyAll(pid, python, maps, deadline); }).join();
  if (copies.threads.empty()) {
    error = "process " + std::to_string(pid) + " has ended";
    return result;
  }
  const auto failed = [](const CopiedThread& thread) { return !thread.problem.empty(); };
  if (std::all_of(copies.threads.begin(), copies.threads.end(), failed)) {
    error = copies.threads[0].problem;  // the same for all: permission, or a debugger
  }
  const auto stacks = Unwinder(pid, maps, python.evalFunction()).unwind(copies.threads, deadline);
  for (size_t i = 0; i < stacks.size(); ++i) {
    const CopiedThread& thread = copies.threads[i];
    const auto at = copies.python.find(thread.tid);
    MergedThread merged{thread.tid, thread.name, thread.state, thread.tid == pid, {}};
    merged.stack =
        mergeStack(stacks[i], at == copies.python.end() ? std::nullopt : std::optional(at->second));
    merged.holds_gil = at != copies.python.end() && at->second.holds_gil;
    result.merged.threads.push_back(std::move(merged));
  }
  // Checked last: all reads above then belong to one program.
  if (programOf(pid) != program) {
    result.merged.threads.clear();
    error = "process " + std::to_string(pid) +
            " has ended, or has begun another program, while it was read";
  }
  return result;
}

}  // namespace reft
