#include "hang_detect/evidence/process_state.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include "hang_detect/evidence/evidence.h"
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

// (name, state, rest) of /proc/<pid>/stat. The state follows the last parenthesis: the name before
// may hold anything.
struct Stat {
  std::string name, state, rest;
};
Stat statOf(int pid) {
  const std::string text = procFile(pid, "stat");
  const size_t open = text.find('(');
  const size_t close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open ||
      close + 3 >= text.size()) {
    return {};
  }
  return {text.substr(open + 1, close - open - 1), text.substr(close + 2, 1),
          text.substr(close + 3)};
}

constexpr size_t kMaxChildren = 256;

}  // namespace

ProcessCounters processCounters(int pid) noexcept {
  ProcessCounters result;
  try {
    const Stat stat = statOf(pid);
    long long utime = 0, stime = 0, cutime = 0, cstime = 0;
    if (std::sscanf(stat.rest.c_str(),
                    "%*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lld %lld %lld %lld", &utime, &stime,
                    &cutime, &cstime) == 4) {
      result.cpu_ns = (utime + stime + cutime + cstime) * (1'000'000'000 / ::sysconf(_SC_CLK_TCK));
    }
    const std::string io = procFile(pid, "io");
    const int64_t read = numberAfter(io, "rchar: ");
    const int64_t written = numberAfter(io, "wchar: ");
    result.io_bytes = read < 0 || written < 0 ? -1 : read + written;
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
  try {
    const std::string state = statOf(pid).state;
    return state == "T" || state == "t";
  } catch (...) {  // no memory left
    return false;
  }
}

std::vector<int> childrenOf(int pid) noexcept {
  std::vector<int> children;
  try {
    std::string list = procFile(pid, ("task/" + std::to_string(pid) + "/children").c_str());
    for (char *at = list.data(), *end = nullptr; children.size() < kMaxChildren; at = end) {
      const long child = std::strtol(at, &end, 10);
      if (end == at) {
        break;
      }
      children.push_back(static_cast<int>(child));
    }
  } catch (
      ...) {  // NOLINT(bugprone-empty-catch): no memory left; those that were found are something
  }
  return children;
}

void addProcessState(RankEvidence& rank) noexcept {
  rank.alive = false;
  rank.proc_state.clear();
  rank.children.clear();
  if (rank.pid <= 0) {
    return;
  }
  try {
    rank.proc_state = statOf(rank.pid).state;
    rank.alive = !rank.proc_state.empty() && rank.proc_state != "Z" && rank.proc_state != "X";
    if (!rank.alive) {
      return;
    }
    rank.tracer_pid = tracerOf(rank.pid);
    rank.wait_channel = procFile(rank.pid, "wchan", 64);
    for (const int child : childrenOf(rank.pid)) {
      const Stat stat = statOf(child);
      rank.children.push_back({child, stat.state, stat.name});
    }
  } catch (const std::exception& problem) {
    rank.error +=
        (rank.error.empty() ? "" : "; ") + std::string("process state: ") + problem.what();
  }
}

}  // namespace reft
