// What the ops of the recent past say: where ranks have waited before, who comes last, and whose
// order of ops differs.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <optional>
#include <set>

#include "hang_detect/verdict/job_view.h"

namespace reft {

// A rank that was the last to come in most collectives for which the others had to wait.
struct Straggler {
  size_t rank = 0;
  size_t times_last = 0;
  size_t collectives = 0;  // that all members of their group have done
  double usual_wait_sec = 0;
  double share_of_time = 0;  // time that the others waited for it, of the time looked at
};

// nullopt if no rank is, or if the present wait of `still_sec` is much longer than those for it:
// then it may be about to hang. Compares no clocks of different hosts: the rank that spends the
// least time in a collective is the last to come.
std::optional<Straggler> findStraggler(const JobView& view, double still_sec);

// True if some rank waits and no wait is longer than a moment. Where ranks stand at an instant only
// says which one is last this time.
bool allWaitsAreRecent(const JobView& view);

// True if a rank of `waiting` waits at a place of the program where it has been before, and no rank
// ever waited there for nearly as long. Otherwise the job may be in a new phase, as its first step,
// an evaluation or an export. The history of one rank is not enough: the rank that mostly comes
// last has never waited anywhere.
bool waitsAtAFamiliarPlace(const JobView& view, const std::set<size_t>& waiting, double still_sec);

// The ranks of `suspects` whose order of ops differs from the one that at least two thirds of the
// largest group share. Empty if no order is that common, or if the comparison means nothing.
std::set<size_t> ranksOutOfOrder(const JobView& view, const std::set<size_t>& suspects);

}  // namespace reft
