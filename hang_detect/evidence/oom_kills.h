// How often the kernel's OOM killer has ended a process of a cgroup.
//
// Threads: re-entrant. Errors: none: what cannot be read is unknown.
#pragma once

#include <cstdint>
#include <string>

namespace reft {

inline constexpr char kOomKillText[] =
    "the kernel's OOM killer has ended a process of its cgroup since it began";

// The file of `pid`'s cgroup that counts them: memory.events (v2) or memory.oom_control (v1); "":
// there is none to be seen. To be asked for while the process lives. `root`: of the file system,
// for tests.
std::string oomCounterOf(int pid, const std::string& root = "") noexcept;

// < 0: unknown.
int64_t oomKills(const std::string& counter) noexcept;

}  // namespace reft
