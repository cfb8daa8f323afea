// /proc/<pid>/stat of a process or a thread.
//
// Threads: re-entrant. No allocation, no lock: callers look at processes, their own included, that
// may be stuck anywhere. Errors:  none; nullopt if the process is gone or the line cannot be
// understood.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace reft {

struct ProcStat {
  char state = '?';  // R S D T t Z X, see proc(5)
  int parent = 0;
  int64_t cpu_ticks = -1;     // own and of children waited for, in clock ticks; -1: not in the line
  int64_t major_faults = -1;  // own pages read from a disk or from swap; -1: not in the line
  int64_t start_ticks = -1;   // when it began, in clock ticks since boot; -1: not in the line

  // The command's name as the kernel has it: any bytes.
  std::string_view name() const { return {name_, name_bytes_}; }

 private:
  friend std::optional<ProcStat> parseProcStat(std::string_view line) noexcept;
  char name_[64] = {};
  size_t name_bytes_ = 0;
};

std::optional<ProcStat> parseProcStat(std::string_view line) noexcept;
std::optional<ProcStat> procStat(int pid) noexcept;
std::optional<ProcStat> threadStat(int pid, int tid) noexcept;

}  // namespace reft
