// State and resource use of a process and of those that it started, from /proc.
//
// Threads: free functions, re-entrant. Errors: none: unreadable values are unknown.
#pragma once

#include <cstdint>
#include <vector>

namespace reft {

// Processor time and I/O of a process and its ended children, since its start; I/O includes the
// pages that the process itself had to read, from swap too. < 0 = unknown.
struct ProcessCounters {
  int64_t cpu_ns = -1;
  int64_t io_bytes = -1;
  // Processor time of its living descendants and of their ended children. With cpu_ns it grows
  // even when one of them ends: its parent, which waits for it, takes its time over.
  int64_t descendants_cpu_ns = 0;
};
ProcessCounters processCounters(int pid) noexcept;

// Children of the main thread of `pid` that nobody has reaped yet.
std::vector<int> childrenOf(int pid) noexcept;

// What any thread of `pid` has started, and what those have, parents first; at most 256.
std::vector<int> descendantsOf(int pid) noexcept;

// The process that traces `pid`; 0 = none or unknown.
int tracerOf(int pid) noexcept;

// True in state T or t.
bool processIsStopped(int pid) noexcept;

}  // namespace reft
