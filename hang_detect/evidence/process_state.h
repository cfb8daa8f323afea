// What /proc knows about a process and its children.
//
// Threads: free functions, re-entrant. Errors: none: what cannot be read is unknown.
#pragma once

#include <cstdint>
#include <vector>

namespace reft {

// Processor time and I/O so far, of a process and of those it started and that ended. < 0 =
// unknown.
struct ProcessCounters {
  int64_t cpu_ns = -1;
  int64_t io_bytes = -1;
};
ProcessCounters processCounters(int pid) noexcept;

// Processes that the main thread of `pid` has started and that have not been reaped.
std::vector<int> childrenOf(int pid) noexcept;

// Process that traces `pid`; 0 = none, or that is unknown.
int tracerOf(int pid) noexcept;

// State T or t.
bool processIsStopped(int pid) noexcept;

}  // namespace reft
