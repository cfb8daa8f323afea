// Merges the evidence of several nodes, whose clocks are unrelated.
#include <algorithm>
#include <iterator>
#include <set>

#include "hang_detect/evidence/evidence.h"

namespace reft {

namespace {

uint64_t shifted(uint64_t at_ns, int64_t by_ns) {
  if (at_ns == 0) {
    return 0;  // not happened yet
  }
  const auto moved = at_ns + static_cast<uint64_t>(by_ns);
  return moved == 0 || static_cast<int64_t>(moved) < 0 ? 1
                                                       : moved;  // before this node's clock began
}

}  // namespace

void addNode(HangEvidence& evidence, HangEvidence other, int64_t shift_ns, int64_t error_ns) {
  std::set<int> known;
  for (const RankEvidence& rank : evidence.ranks) {
    known.insert(rank.rank);
  }
  const auto ours = static_cast<uint64_t>(evidence.now_ns);
  const uint64_t theirs = shifted(static_cast<uint64_t>(other.now_ns), shift_ns);
  for (RankEvidence& rank : other.ranks) {
    if (!known.insert(rank.rank).second) {
      continue;
    }
    for (OpEntry& op : rank.tail) {
      for (uint64_t* at :
           {&op.begin_ns, &op.enqueued_ns, &op.wait_begin_ns, &op.wait_end_ns, &op.done_ns}) {
        *at = shifted(*at, shift_ns);
      }
    }
    if (rank.gone_ns > 0) {
      rank.gone_ns = static_cast<int64_t>(shifted(static_cast<uint64_t>(rank.gone_ns), shift_ns));
    }
    for (int64_t* at :
         {&rank.ending.left_ns, rank.ending.exception ? &rank.ending.exception->at_ns : nullptr,
          rank.ending.in_thread ? &rank.ending.in_thread->at_ns : nullptr,
          rank.ending.fault ? &rank.ending.fault->at_ns : nullptr}) {
      if (at != nullptr && *at > 0) {
        *at = static_cast<int64_t>(shifted(static_cast<uint64_t>(*at), shift_ns));
      }
    }
    if (rank.heartbeat_age_ns != 0) {
      const uint64_t mark = theirs > rank.heartbeat_age_ns ? theirs - rank.heartbeat_age_ns : 1;
      rank.heartbeat_age_ns = ours > mark ? ours - mark : 1;
    }
    evidence.ranks.push_back(std::move(rank));
  }
  std::sort(evidence.ranks.begin(), evidence.ranks.end(),
            [](const RankEvidence& a, const RankEvidence& b) { return a.rank < b.rank; });
  addHardwareNotes(evidence, std::move(other.hardware), other.node);
  evidence.away_sec = std::max(evidence.away_sec, other.away_sec);
  evidence.clock_error_ns = std::max(evidence.clock_error_ns, error_ns);
}

}  // namespace reft
