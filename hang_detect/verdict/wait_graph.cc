#include "hang_detect/verdict/wait_graph.h"

#include <algorithm>
#include <optional>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/verdict/suspect.h"

namespace reft {

namespace {

// Messages between a member and `peer`, with this tag, in the member's log up to `last` (nullptr:
// all).
size_t countMessages(const Member& member, bool sends, int32_t peer, uint32_t tag,
                     const OpEntry* last) {
  size_t count = 0;
  for (const OpEntry* op : member.p2p) {
    count +=
        (op->kind == OpKind::kSend) == sends && op->peer == peer && op->tag == tag && !op->failed;
    if (op == last) {
      break;
    }
  }
  return count;
}

bool isWholeLog(const RankEvidence& rank) {
  return rank.ops_begun <= rank.tail.size();
}

}  // namespace

WaitGraph::WaitGraph(const JobView& view) : view_(view), nodes_(view.ranks().size()) {
  for (const GroupLog& group : view.groups()) {
    addCollectives(group);
    addMessages(group);
  }
  addCoalesced();
  for (const Wait& wait : waits_) {
    if (const auto* collective = std::get_if<CollectiveWait>(&wait)) {
      for (const size_t rank : collective->missing) {
        behind_.erase(rank);
      }
    }
  }
}

const Wait* WaitGraph::widestWait() const {
  const Wait* widest = nullptr;
  size_t most = 0;
  for (const Wait& wait : waits_) {
    const auto* collective = std::get_if<CollectiveWait>(&wait);
    const size_t ranks = collective != nullptr                       ? collective->waiting.size()
                         : std::holds_alternative<MessageWait>(wait) ? 1
                                                                     : 0;
    if (ranks > most) {
      most = ranks;
      widest = &wait;
    }
  }
  return widest;
}

// The collectives in which members are held first, up to the first one that a member has not begun,
// and that one. Who is held further on waits behind it.
std::set<uint32_t> WaitGraph::suspectOps(const GroupLog& group) const {
  std::set<uint32_t> result;
  std::optional<uint32_t> slowest, first_missed;
  for (const Member& member : group.members) {
    if (member.reaches) {
      slowest = std::min(slowest.value_or(member.newest), member.newest);
    }
    const auto first = std::find_if(member.ops.begin(), member.ops.end(), [&](const OpEntry* op) {
      return view_.isHeld(member.rank, *op);
    });
    if (first != member.ops.end()) {
      result.insert((*first)->seq);
    }
  }
  for (const Member& member : group.members) {
    const auto next =
        slowest && *slowest < UINT32_MAX ? member.from(*slowest + 1) : member.ops.end();
    if (next != member.ops.end()) {
      first_missed = std::min(first_missed.value_or((*next)->seq), (*next)->seq);
    }
  }
  if (first_missed) {
    result.erase(result.upper_bound(*first_missed), result.end());
    result.insert(*first_missed);
  }
  return result;
}

void WaitGraph::addCollectives(const GroupLog& group) {
  for (const uint32_t seq : suspectOps(group)) {
    addCollective(group, seq);
  }
}

bool WaitGraph::waitsIn(const Member& member, uint32_t seq, bool some_are_missing) const {
  const auto at = member.from(seq);
  if (at != member.ops.end() && (*at)->seq == seq) {
    if (isAheadOfDevice(**at)) {
      return false;
    }
    if (view_.isHeld(member.rank, **at)) {
      return true;
    }
  }
  // Later ops of the group wait behind this one, which may be over for this rank (as for a
  // broadcast's root).
  return some_are_missing && std::any_of(at, member.ops.end(), [&](const OpEntry* later) {
           return view_.isHeld(member.rank, *later) || mayRunOnDevice(*later) ||
                  (isUnwaited(*later) && view_.placeOf(member.rank) != CallerPlace::kElsewhere);
         });
}

void WaitGraph::addCollective(const GroupLog& group, uint32_t seq) {
  CollectiveWait wait;
  wait.group = &group;
  wait.seq = seq;
  std::vector<size_t> gone_inside;         // dead or stopped in the op
  std::vector<const OpEntry*> behind_ops;  // as the ranks of `behind` have it
  for (const Member& member : group.members) {
    const OpEntry* op = member.find(seq);
    if (op == nullptr && !member.reaches) {
      wait.out_of_reach.push_back(member.rank);
    } else if (op == nullptr && member.newest < seq) {
      wait.missing.push_back(member.rank);
    } else if (op != nullptr && isOpen(*op) && isOutOfAction(view_.ranks()[member.rank])) {
      gone_inside.push_back(member.rank);
    } else if (op != nullptr && isAheadOfDevice(*op)) {
      wait.behind.push_back(member.rank);
      behind_ops.push_back(op);
    }
  }
  const bool some_are_missing = !wait.missing.empty() || !wait.behind.empty();
  for (const Member& member : group.members) {
    if (!isOutOfAction(view_.ranks()[member.rank]) && waitsIn(member, seq, some_are_missing)) {
      wait.waiting.push_back(member.rank);
      wait.op = wait.op != nullptr ? wait.op : member.find(seq);
    }
  }
  if (wait.waiting.empty()) {
    return;
  }
  const size_t index = nodes_.size();
  Node& node = nodes_.emplace_back();
  node.edges = wait.missing;
  node.edges.insert(node.edges.end(), gone_inside.begin(), gone_inside.end());
  node.edges.insert(node.edges.end(), wait.behind.begin(), wait.behind.end());
  node.outside = !wait.out_of_reach.empty() || group.invisibleMembers() > 0;
  node.stuck = node.edges.empty() && !node.outside;
  for (const size_t rank : wait.waiting) {
    nodes_[rank].edges.push_back(index);
    waiting_.insert(rank);
  }
  wait.all_begun = nodes_[index].stuck;
  for (size_t i = 0; i < wait.behind.size(); ++i) {
    behind_.emplace(wait.behind[i], behind_ops[i]);
  }
  waits_.emplace_back(std::move(wait));
}

void WaitGraph::addMessages(const GroupLog& group) {
  for (const Member& member : group.members) {
    if (isOutOfAction(view_.ranks()[member.rank])) {
      continue;
    }
    for (const OpEntry* op : member.p2p) {
      if (view_.isHeld(member.rank, *op) && !isAheadOfDevice(*op)) {
        addMessage(group, member, *op);
      }
    }
  }
}

void WaitGraph::addMessage(const GroupLog& group, const Member& member, const OpEntry& op) {
  MessageWait wait;
  wait.rank = member.rank;
  wait.group = &group;
  wait.op = &op;
  Node& node = nodes_[member.rank];
  waiting_.insert(member.rank);
  const auto at = op.kind == OpKind::kRecvAnysource ? group.by_group_rank.end()
                                                    : group.by_group_rank.find(op.peer);
  if (at == group.by_group_rank.end()) {
    node.outside = true;
    waits_.emplace_back(wait);
    return;
  }
  const Member& peer = group.members[at->second];
  wait.peer = &peer;
  if (isOutOfAction(view_.ranks()[peer.rank])) {
    node.edges.push_back(peer.rank);
    waits_.emplace_back(wait);
    return;
  }
  const bool is_send = op.kind == OpKind::kSend;
  for (const OpEntry* theirs : peer.p2p) {
    if (isOpen(*theirs) && theirs->peer == member.group_rank &&
        (theirs->kind == OpKind::kSend) != is_send) {
      (theirs->tag == op.tag ? wait.match : wait.crossed) = theirs;
    }
  }
  wait.peer_done = isWholeLog(view_.ranks()[member.rank]) && isWholeLog(view_.ranks()[peer.rank]) &&
                   countMessages(peer, !is_send, member.group_rank, op.tag, nullptr) >=
                       countMessages(member, is_send, op.peer, op.tag, &op);
  wait.peer_behind = wait.match != nullptr && isAheadOfDevice(*wait.match);
  if (wait.peer_behind) {
    node.edges.push_back(peer.rank);
    behind_.emplace(peer.rank, wait.match);
  } else if (wait.match != nullptr || wait.peer_done) {
    node.stuck = true;
    wait.crossed = nullptr;
  } else {
    node.edges.push_back(peer.rank);
  }
  if (wait.crossed != nullptr || (wait.match != nullptr && wait.match->signature != op.signature)) {
    mismatches_.insert({member.rank, peer.rank});
  }
  waits_.emplace_back(wait);
}

void WaitGraph::addCoalesced() {
  for (size_t r = 0; r < view_.ranks().size(); ++r) {
    for (const OpEntry& op : view_.ranks()[r].tail) {
      if (op.kind == OpKind::kCoalesced && view_.isHeld(r, op) &&
          !isOutOfAction(view_.ranks()[r])) {
        nodes_[r].outside = true;
        waiting_.insert(r);
        waits_.emplace_back(CoalescedWait{r});
      }
    }
  }
}

// Tarjan's strongly connected components, without recursion: a graph may be as deep as the job has
// ranks.
WaitGraph::Ends WaitGraph::ends() const {
  Ends ends;
  const size_t count = nodes_.size();
  const size_t ranks = view_.ranks().size();
  constexpr size_t kUnseen = SIZE_MAX;
  std::vector<size_t> number(count, kUnseen), low(count), next(count);
  std::vector<bool> open(count);
  std::vector<size_t> stack, path;
  size_t counter = 0;
  for (const size_t start : waiting_) {
    if (number[start] != kUnseen) {
      continue;
    }
    path.push_back(start);
    while (!path.empty()) {
      const size_t at = path.back();
      const Node& node = nodes_[at];
      if (number[at] == kUnseen) {
        number[at] = low[at] = counter++;
        stack.push_back(at);
        open[at] = true;
        ends.outside = ends.outside || node.outside;
        ends.stuck = ends.stuck || node.stuck;
        if (at < ranks && node.isSink()) {
          ends.sinks.insert(at);
        }
      }
      if (next[at] < node.edges.size()) {
        const size_t to = node.edges[next[at]++];
        if (number[to] == kUnseen) {
          path.push_back(to);
        } else if (open[to]) {
          low[at] = std::min(low[at], number[to]);
        }
        continue;
      }
      path.pop_back();
      if (!path.empty()) {
        low[path.back()] = std::min(low[path.back()], low[at]);
      }
      if (low[at] == number[at]) {
        std::vector<size_t> members;  // ranks of the component
        size_t in_component = 0;
        for (size_t top = kUnseen; top != at; ++in_component) {
          top = stack.back();
          stack.pop_back();
          open[top] = false;
          if (top < ranks) {
            members.push_back(top);
          }
        }
        if (in_component > 1) {
          std::sort(members.begin(), members.end());
          ends.cycles.push_back(std::move(members));
        }
      }
    }
  }
  return ends;
}

}  // namespace reft
