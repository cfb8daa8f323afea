// Who has to leave when peers take all places of their kind, so that no flood keeps ranks out.
//
// Places are counted apart: peers that have not said hello (`strangers`), tools, and ranks. A peer
// that comes always gets a place; what is given up is a place of the process that has the most. So
// a process that opens many connections only drives out its own.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reft::agent {

constexpr size_t kMostStrangers = 16;
constexpr size_t kMostTools = 64;
constexpr size_t kMostRanks = 4096;

// A connection of one kind.
struct Seat {
  uint64_t id = 0;
  int pid = 0;           // 0: of another PID namespace; all of those count as one process
  int64_t heard_ns = 0;  // when it last sent something
};

// The connection to drop, 0 if there are at most `most`: of the process with the most connections,
// the one that has been silent for longest.
uint64_t surplus(const std::vector<Seat>& seats, size_t most);

}  // namespace reft::agent
