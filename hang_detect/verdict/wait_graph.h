// Who waits for whom, as a graph.
//
// Note [wait-for graph]
// Nodes are ranks and collectives. A rank that is held in collective n of a group points to that
// op, and the op to the members that have not begun it; a rank in a receive points to the sender,
// in a send to the receiver. A node goes on only after all that it points to. So the ranks at the
// end of the edges, the sinks, hold up the job, whatever part of it waits behind them; and ranks in
// a cycle hold up each other for good. Dead and stopped ranks wait for no other, whatever their op
// log says, and those who share an open op with them wait for them.
//
// An op on a device lets its caller go on, and the log seldom learns that it is done. So an open op
// that is not held counts only where a member has not begun it, and not if the stack shows that the
// rank waits for something else.
//
// Where streams say what they have come to (intercept/record/device_ops.h), a member whose device
// has not reached an op in which others are is *behind*: they wait for it, as for one that has not
// begun the op. It does not wait there itself; if its stream stands in an earlier op, it waits in
// that one.
//
// Threads: a WaitGraph belongs to one thread; it points into the view, which must outlive it.
// Errors:  none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "hang_detect/verdict/job_view.h"

namespace reft {

// Ranks are indices into HangEvidence::ranks.

struct CollectiveWait {
  const GroupLog* group = nullptr;
  uint32_t seq = 0;
  const OpEntry* op = nullptr;  // as a waiting rank has it; nullptr if all wait in later ops
  std::vector<size_t> waiting;
  std::vector<size_t> missing;       // have not begun it
  std::vector<size_t> behind;        // have begun it, and their devices have not reached it
  std::vector<size_t> out_of_reach;  // their logs do not reach back to the group
  bool all_begun = false;
};

struct MessageWait {
  size_t rank = 0;
  const GroupLog* group = nullptr;
  const OpEntry* op = nullptr;
  const Member* peer = nullptr;      // nullptr: any rank, or one that is not visible
  const OpEntry* match = nullptr;    // the peer's open op with the same tag
  const OpEntry* crossed = nullptr;  // without a match: its open op with another tag
  bool peer_done = false;            // the peer has sent or received its part already
  bool peer_behind = false;          // `match` is an op that the peer's device has not reached
};

struct CoalescedWait {
  size_t rank = 0;
};

using Wait = std::variant<CollectiveWait, MessageWait, CoalescedWait>;

class WaitGraph {
 public:
  // What a walk along the edges from all waiting ranks meets.
  struct Ends {
    std::set<size_t> sinks;                   // ranks that others wait for and that do not wait
    std::vector<std::vector<size_t>> cycles;  // ranks of each strongly connected component
    bool outside = false;                     // some wait leads to ranks that are not visible
    bool stuck = false;  // some op does not end although every party to it has begun it
  };

  explicit WaitGraph(const JobView& view);

  const std::vector<Wait>& waits() const { return waits_; }
  const std::set<size_t>& waitingRanks() const { return waiting_; }
  // Ranks that are behind in an op in which others wait, and that op as they have it. Without
  // those that some others wait for because they have not begun an op.
  const std::map<size_t, const OpEntry*>& behind() const { return behind_; }
  // Pairs of ranks whose messages differ in tag, size or type.
  const std::set<std::pair<size_t, size_t>>& mismatches() const { return mismatches_; }
  // The collective in which most ranks wait, or else the first message; nullptr if none waits.
  const Wait* widestWait() const;
  Ends ends() const;

 private:
  struct Node {
    std::vector<size_t> edges;
    bool outside = false;
    bool stuck = false;
    bool isSink() const { return edges.empty() && !outside && !stuck; }
  };

  void addCollectives(const GroupLog& group);
  void addCollective(const GroupLog& group, uint32_t seq);
  void addMessages(const GroupLog& group);
  void addMessage(const GroupLog& group, const Member& member, const OpEntry& op);
  void addCoalesced();
  std::set<uint32_t> suspectOps(const GroupLog& group) const;
  bool waitsIn(const Member& member, uint32_t seq, bool some_are_missing) const;

  const JobView& view_;
  std::vector<Node> nodes_;  // ranks first, then collectives
  std::vector<Wait> waits_;
  std::set<size_t> waiting_;
  std::map<size_t, const OpEntry*> behind_;
  std::set<std::pair<size_t, size_t>> mismatches_;
};

}  // namespace reft
