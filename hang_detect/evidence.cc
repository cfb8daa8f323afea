#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "hang_detect/report.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

void addError(RankEvidence& rank, const char* what, const std::string& text) noexcept {
  try {
    rank.error += (rank.error.empty() ? "" : "; ") + std::string(what) + ": " + text;
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left for the sentence
  }
}

}  // namespace

void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count,
              uint32_t writer) noexcept {
  try {
    const OpLogReader reader(area, bytes);
    if (writer != 0 && reader.writerPid() != writer) {
      addError(rank, "op log", "the process has not begun its own yet");
      return;
    }
    rank.groups = reader.groups();
    rank.tail = reader.tail(count);
    rank.call_sites = reader.callSites();
    rank.ops_begun = reader.opsBegun();
    const uint64_t heartbeat = reader.heartbeatNs();
    const auto now = static_cast<uint64_t>(now_ns);
    rank.heartbeat_age_ns = heartbeat != 0 && heartbeat < now ? now - heartbeat : 0;
  } catch (const std::exception& problem) {
    addError(rank, "op log", problem.what());
  }
}

void addStackReply(RankEvidence& rank, std::string_view payload) noexcept {
  try {
    const auto reply = nlohmann::json::parse(payload, nullptr, /*allow_exceptions=*/false);
    if (!reply.is_object() || !reply.contains("text") || !reply["text"].is_string()) {
      addError(rank, "stacks", "the reply is not one");
      return;
    }
    rank.answered = true;
    rank.stacks_text = reply["text"].get<std::string>();
    if (reply.contains("error") && reply["error"].is_string() && !reply["error"].get<std::string>().empty()) {
      addError(rank, "stacks", reply["error"].get<std::string>());
    }
  } catch (const std::exception& problem) {
    addError(rank, "stacks", problem.what());
  }
}

namespace {

// Nothing of /proc is longer than what is wanted of it here; "" if it cannot be read.
std::string procFile(int pid, const char* name, size_t limit = 4096) {
  const UniqueFd fd(::open(("/proc/" + std::to_string(pid) + "/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  std::string text(limit, '\0');
  const ssize_t got = fd ? ::read(fd.get(), text.data(), text.size()) : -1;
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

int64_t numberAfter(const std::string& text, const char* key) {
  const size_t at = text.find(key);
  return at == std::string::npos ? -1 : std::strtoll(text.c_str() + at + std::strlen(key), nullptr, 10);
}

// (name, state, rest) of /proc/<pid>/stat. The state follows the last parenthesis: the name before may hold anything.
struct Stat {
  std::string name, state, rest;
};
Stat statOf(int pid) {
  const std::string text = procFile(pid, "stat");
  const size_t open = text.find('(');
  const size_t close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open || close + 3 >= text.size()) {
    return {};
  }
  return {text.substr(open + 1, close - open - 1), text.substr(close + 2, 1), text.substr(close + 3)};
}

constexpr size_t kMaxChildren = 256;

}  // namespace

ProcessCounters processCounters(int pid) noexcept {
  ProcessCounters result;
  try {
    const Stat stat = statOf(pid);
    long long utime = 0, stime = 0, cutime = 0, cstime = 0;
    if (std::sscanf(stat.rest.c_str(), "%*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lld %lld %lld %lld", &utime, &stime,
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
    return static_cast<int>(std::max<int64_t>(0, numberAfter(procFile(pid, "status"), "TracerPid:\t")));
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
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left; those that were found are something
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
    addError(rank, "process state", problem.what());
  }
}

}  // namespace reft
