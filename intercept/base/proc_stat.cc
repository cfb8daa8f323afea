#include "intercept/base/proc_stat.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

std::optional<ProcStat> statAt(const char* path) noexcept {
  const UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  char line[1024];  // a line has 52 fields and is shorter
  const ssize_t got = fd ? ::read(fd.get(), line, sizeof(line)) : -1;
  return got > 0 ? parseProcStat({line, static_cast<size_t>(got)}) : std::nullopt;
}

}  // namespace

std::optional<ProcStat> parseProcStat(std::string_view line) noexcept {
  // The name may hold blanks and parentheses: it ends at the last one.
  const size_t open = line.find('(');
  const size_t close = line.rfind(')');
  if (open == std::string_view::npos || close == std::string_view::npos || close < open ||
      close + 2 >= line.size()) {
    return std::nullopt;
  }
  ProcStat stat;
  stat.name_bytes_ = std::min(close - open - 1, sizeof(stat.name_));
  std::memcpy(stat.name_, line.data() + open + 1, stat.name_bytes_);
  stat.state = line[close + 2];
  char rest[512];
  const std::string_view after = line.substr(close + 3, sizeof(rest) - 1);
  std::memcpy(rest, after.data(), after.size());
  rest[after.size()] = '\0';
  long long faults = 0, user = 0, system = 0, children_user = 0, children_system = 0, start = 0;
  const int found =
      std::sscanf(rest,
                  "%d %*d %*d %*d %*d %*u %*u %*u %lld %*u %lld %lld %lld %lld "
                  "%*d %*d %*d %*d %lld",
                  &stat.parent, &faults, &user, &system, &children_user, &children_system, &start);
  if (found >= 6) {
    stat.major_faults = faults;
    stat.cpu_ticks = user + system + children_user + children_system;
  }
  if (found == 7) {
    stat.start_ticks = start;
  }
  return stat;
}

std::optional<ProcStat> procStat(int pid) noexcept {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  return statAt(path);
}

std::optional<ProcStat> threadStat(int pid, int tid) noexcept {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", pid, tid);
  return statAt(path);
}

}  // namespace reft
