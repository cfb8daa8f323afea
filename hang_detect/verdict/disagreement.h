// Ops about which the members of a group disagree.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hang_detect/verdict/job_view.h"

namespace reft {

// Not necessarily part of a hang.
struct Disagreement {
  std::string what;  // op_mismatch | size_mismatch | dtype_mismatch | root_mismatch
  std::string group;
  size_t log = 0;  // of the group: an index into JobView::groups()
  uint32_t seq = 0;
  std::vector<int> minority;  // empty: no strict majority of the group, so any side may be wrong
  std::vector<int> ranks;     // all whose op of this number is known
  bool waited_for = false;    // some rank waits in the group, or failed in it, since that op
  std::string text;           // what each side calls, the smallest side first: one line a side

  // The minority; all sides if there is none.
  const std::vector<int>& suspects() const { return minority.empty() ? ranks : minority; }
};

// The first disagreement of each group: after it, equal numbers no longer mean the same op.
std::vector<Disagreement> findDisagreements(const JobView& view);

}  // namespace reft
