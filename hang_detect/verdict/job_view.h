// The evidence of a job, indexed: the ops of each process group over all ranks, and which of them
// hold up their caller.
//
// An op is *held* while its caller is inside the call or inside wait(). Without such a mark it is
// held while its caller stands where futures are waited for: DDP takes the future of each op
// and waits for all of them at the end of backward.
//
// Threads: a JobView belongs to one thread; it points into the evidence, which must outlive it.
// Errors:  none: ops of a group that the log does not know are left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "intercept/record/op_log.h"

namespace reft {

// One rank's part in one group.
struct Member {
  size_t rank = 0;  // index into HangEvidence::ranks
  int32_t group_rank = -1;
  uint32_t newest = 0;              // number of the newest collective begun
  bool reaches = true;              // false: the tail has no collective, older ones may exist
  std::vector<const OpEntry*> ops;  // collectives, by number
  std::vector<const OpEntry*> p2p;  // oldest first

  // The collective of this number; nullptr if the tail lacks it.
  const OpEntry* find(uint32_t seq) const;
  // The first collective of this number or a higher one.
  std::vector<const OpEntry*>::const_iterator from(uint32_t seq) const;
};

struct GroupLog {
  std::string name;
  int64_t size = 0;  // members, visible or not
  std::vector<Member> members;
  std::unordered_map<int32_t, size_t> by_group_rank;  // index into `members`

  int64_t invisibleMembers() const { return size - static_cast<int64_t>(members.size()); }
};

// Where the thread of a rank stands (standingOf()), as far as it matters for ops that carry no mark
// of a wait.
enum class CallerPlace : uint8_t {
  kUnknown,    // no stack, or a call that may wait for an op under another name
  kFutures,    // waits for futures
  kElsewhere,  // waits for something that is no op
};

class JobView {
 public:
  explicit JobView(const HangEvidence& evidence);

  const HangEvidence& evidence() const { return evidence_; }
  const std::vector<RankEvidence>& ranks() const { return evidence_.ranks; }
  const std::vector<GroupLog>& groups() const { return groups_; }

  bool isHeld(size_t rank, const OpEntry& op) const;
  // The newest op that holds up the rank, steps left out; nullptr if none does.
  const OpEntry* newestHeld(size_t rank) const;
  CallerPlace placeOf(size_t rank) const;

  // Rank numbers of indices, sorted; and back.
  std::vector<int> numbersOf(const std::vector<size_t>& indices) const;
  std::set<size_t> indicesOf(const std::vector<int>& numbers) const;

  // Seconds since the newest mark in the log of a live rank, without the time during which the
  // agent itself stood still.
  double stillSec() const;

 private:
  const HangEvidence& evidence_;
  std::vector<GroupLog> groups_;
  mutable std::vector<std::optional<CallerPlace>> places_;  // filled on demand
};

}  // namespace reft
