#include <cstdio>
#include <cstring>
#include <exception>

#include <fcntl.h>
#include <unistd.h>

#include "hang_detect/report.h"
#include "intercept/base/unique_fd.h"

namespace reft {

void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count) noexcept {
  try {
    const OpLogReader reader(area, bytes);
    rank.groups = reader.groups();
    rank.tail = reader.tail(count);
    rank.ops_begun = reader.opsBegun();
    const uint64_t heartbeat = reader.heartbeatNs();
    const auto now = static_cast<uint64_t>(now_ns);
    rank.heartbeat_age_ns = heartbeat != 0 && heartbeat < now ? now - heartbeat : 0;
  } catch (const std::exception& problem) {
    try {
      rank.error += (rank.error.empty() ? "op log: " : "; op log: ") + std::string(problem.what());
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left for the sentence
    }
  }
}

void addProcessState(RankEvidence& rank) noexcept {
  rank.alive = false;
  rank.proc_state.clear();
  if (rank.pid <= 0) {
    return;
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", rank.pid);
  UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t got = fd ? ::read(fd.get(), text, sizeof(text)) : -1;
  if (got <= 0) {
    return;
  }
  // The state follows the last parenthesis: the name before may hold anything.
  const auto* close = static_cast<const char*>(::memrchr(text, ')', static_cast<size_t>(got)));
  if (close == nullptr || close + 2 >= text + got) {
    return;
  }
  rank.proc_state.assign(1, close[2]);
  rank.alive = close[2] != 'Z' && close[2] != 'X';
}

}  // namespace reft
