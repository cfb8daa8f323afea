// Between which ranks the network carries nothing, from the connections of both sides.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "hang_detect/verdict/job_view.h"

namespace reft {

// What `from` sends does not arrive at `to`, or no answer comes back. Indices into
// HangEvidence::ranks.
struct DeadPath {
  size_t from = 0;
  size_t to = 0;
  bool both = false;  // so it is the other way; `from` < `to` then
  int64_t unacknowledged = 0;
  int resent = 0;  // 0: what NCCL's plugin saw, and no connection
};

// Between ranks of `among`, each pair once. A connection to an address of no rank is left out: the
// store's, or of a process that is gone.
std::vector<DeadPath> deadPaths(const JobView& view, const std::set<size_t>& among);

// "nothing passes between rank 1 (n1) and rank 2 (n2): 1.2 MiB are not acknowledged, sent again 7
// times"; then what all of them have in common.
std::vector<std::string> deadPathSentences(const JobView& view, const std::vector<DeadPath>& paths);

}  // namespace reft
