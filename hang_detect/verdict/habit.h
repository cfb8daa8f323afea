// What a rank has done step after step, and which rank departs from that.
//
// Note [habit]
// Training repeats itself: after the same ops comes the same next op, from the same line. So a
// rank's own log predicts its next op, without a look at other ranks: the longest run of newest
// ops that the log has often enough is always followed by one op, the usual one. A rank *keeps* its
// habit if that is what it does, and *leaves* it if it does another op of its habit instead: it has
// left an op out, added one, or changed their order. An op that it has seldom done before is not
// a fault but a new phase: nothing is known until the rank has kept a habit several times again.
// The same holds where several ops come next in turn.
//
// Only the ops since the ranks last met count: what a rank did before, the others went along with.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "hang_detect/verdict/job_view.h"

namespace reft {

enum class Habit : uint8_t { kUnknown, kKept, kLeft };

// Where a rank leaves its habit.
struct Departure {
  size_t rank = 0;   // index into HangEvidence::ranks
  PastOp usual;      // what it has always done there
  size_t times = 0;  // as often
  PastOp instead;    // what it does now
};

// What a rank has done: RankEvidence::past and the tail, without steps; from `first` on, an index
// into that list, its habit is asked for. `left` is filled if the result is kLeft.
Habit habitOf(const std::vector<PastOp>& done, size_t first, Departure& left);

// The one of `suspects` that has left its habit; nullopt unless all others of them have kept
// theirs, and no rank besides them has left its own: then the job may be in a new phase.
std::optional<Departure> oddByHabit(const JobView& view, const std::set<size_t>& suspects);

}  // namespace reft
