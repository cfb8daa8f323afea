#include "hang_detect/evidence/process_state.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include "hang_detect/evidence/evidence.h"
#include "intercept/base/proc_stat.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

// Nothing of /proc is longer than what is wanted of it here; "" if it cannot be read.
std::string procFile(int pid, const char* name, size_t limit = 4096) {
  const UniqueFd fd(
      ::open(("/proc/" + std::to_string(pid) + "/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  std::string text(limit, '\0');
  const ssize_t got = fd ? ::read(fd.get(), text.data(), text.size()) : -1;
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

int64_t numberAfter(const std::string& text, const char* key) {
  const size_t at = text.find(key);
  return at == std::string::npos ? -1
                                 : std::strtoll(text.c_str() + at + std::strlen(key), nullptr, 10);
}

constexpr size_t kMaxChildren = 256;

template <typename F>
void forEachThread(int pid, F&& use) {
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(
      ::opendir(("/proc/" + std::to_string(pid) + "/task").c_str()), &::closedir);
  while (const dirent* entry = tasks ? ::readdir(tasks.get()) : nullptr) {
    if (entry->d_name[0] != '.') {
      use(std::string(entry->d_name));
    }
  }
}

int runs(const std::optional<ProcStat>& stat) {
  return stat && (stat->state == 'R' || stat->state == 'D') ? 1 : 0;
}

// Children of one thread, up to kMaxChildren in all.
void addChildren(int pid, const std::string& tid, std::vector<int>& children) {
  std::string list = procFile(pid, ("task/" + tid + "/children").c_str());
  for (char *at = list.data(), *end = nullptr; children.size() < kMaxChildren; at = end) {
    const long child = std::strtol(at, &end, 10);
    if (end == at) {
      break;
    }
    children.push_back(static_cast<int>(child));
  }
}

// Fills in the states of the callers that still live, and drops the others.
void addCallers(RankEvidence& rank) {
  forEachThread(rank.callers.empty() ? 0 : rank.pid, [&](const std::string& entry) {
    const int tid = std::atoi(entry.c_str());
    const auto caller =
        std::find_if(rank.callers.begin(), rank.callers.end(), [&](const CallingThread& known) {
          return tid > 0 && OpThread::tidBitsOf(known.thread) == static_cast<uint16_t>(tid) &&
                 known.state.empty();
        });
    const auto stat = caller == rank.callers.end() ? std::nullopt : threadStat(rank.pid, tid);
    if (stat) {
      caller->state = stat->state;
      caller->wait_channel =
          procFile(rank.pid, ("task/" + std::to_string(tid) + "/wchan").c_str(), 64);
    }
  });
  std::erase_if(rank.callers, [](const CallingThread& caller) { return caller.state.empty(); });
}

}  // namespace

ProcessCounters processCounters(int pid) noexcept {
  ProcessCounters result;
  try {
    const int64_t tick_ns = 1'000'000'000 / ::sysconf(_SC_CLK_TCK);
    const auto stat = procStat(pid);
    if (stat && stat->cpu_ticks >= 0) {
      result.cpu_ns = stat->cpu_ticks * tick_ns;
    }
    const std::string io = procFile(pid, "io");
    const int64_t read = numberAfter(io, "rchar: ");
    const int64_t written = numberAfter(io, "wchar: ");
    result.io_bytes = read < 0 || written < 0 ? -1 : read + written;
    if (stat && stat->major_faults > 0 && result.io_bytes >= 0) {
      result.io_bytes += stat->major_faults * ::sysconf(_SC_PAGESIZE);
    }
    for (const int descendant : descendantsOf(pid)) {
      const auto its = procStat(descendant);
      result.descendants_cpu_ns += its && its->cpu_ticks >= 0 ? its->cpu_ticks * tick_ns : 0;
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left; unknown is said as such
  }
  return result;
}

int tracerOf(int pid) noexcept {
  try {
    return static_cast<int>(
        std::max<int64_t>(0, numberAfter(procFile(pid, "status"), "TracerPid:\t")));
  } catch (...) {  // no memory left
    return 0;
  }
}

bool processIsStopped(int pid) noexcept {
  const auto stat = procStat(pid);
  return stat && (stat->state == 'T' || stat->state == 't');
}

std::vector<int> childrenOf(int pid) noexcept {
  std::vector<int> children;
  try {
    addChildren(pid, std::to_string(pid), children);
  } catch (
      ...) {  // NOLINT(bugprone-empty-catch): no memory left; those that were found are something
  }
  return children;
}

std::vector<int> descendantsOf(int pid) noexcept {
  std::vector<int> found;
  try {
    int parent = pid;
    for (size_t next = 0; parent > 0; ++next) {
      forEachThread(parent, [&](const std::string& tid) { addChildren(parent, tid, found); });
      parent = next < found.size() ? found[next] : 0;
    }
  } catch (
      ...) {  // NOLINT(bugprone-empty-catch): no memory left; those that were found are something
  }
  return found;
}

void addProcessState(RankEvidence& rank) noexcept {
  rank.alive = false;
  rank.proc_state.clear();
  rank.children.clear();
  if (rank.pid <= 0) {
    return;
  }
  try {
    if (const auto stat = procStat(rank.pid)) {
      rank.proc_state = stat->state;
    }
    rank.alive = !rank.proc_state.empty() && rank.proc_state != "Z" && rank.proc_state != "X";
    if (!rank.alive) {
      rank.callers.clear();
      return;
    }
    rank.tracer_pid = tracerOf(rank.pid);
    rank.wait_channel = procFile(rank.pid, "wchan", 64);
    addCallers(rank);
    rank.running_threads = 0;
    forEachThread(rank.pid, [&](const std::string& tid) {
      rank.running_threads += runs(threadStat(rank.pid, std::atoi(tid.c_str())));
    });
    rank.running_children = 0;
    for (const int descendant : descendantsOf(rank.pid)) {
      rank.running_children += runs(procStat(descendant));
    }
    rank.connections = connectionsOf(rank.pid);
    for (const int child : childrenOf(rank.pid)) {
      const auto stat = procStat(child);
      rank.children.push_back(
          {child, stat ? std::string(1, stat->state) : "", stat ? std::string(stat->name()) : ""});
    }
  } catch (const std::exception& problem) {
    rank.error +=
        (rank.error.empty() ? "" : "; ") + std::string("process state: ") + problem.what();
  }
}

}  // namespace reft
