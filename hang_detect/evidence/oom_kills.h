// The number of processes of a cgroup that the kernel's OOM killer has ended.
//
// Threads: re-entrant. Errors: none: an unreadable counter is unknown.
#pragma once

#include <cstdint>
#include <string>

namespace reft {

inline constexpr char kOomKillText[] =
    "the kernel's OOM killer has ended a process of its cgroup since it began";

// The file of `pid`'s cgroup that counts them: memory.events (v2) or memory.oom_control (v1); ""
// if none is visible. To be called while the process lives. `root`: root of the file system, for
// tests.
std::string oomCounterOf(int pid, const std::string& root = "") noexcept;

// The count in such a file; < 0 = unknown.
int64_t oomKills(const std::string& counter) noexcept;

}  // namespace reft
