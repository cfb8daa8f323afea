#include "hang_detect/words.h"

#include <algorithm>
#include <optional>
#include <set>

// Note [first suspects]
// Who waits for whom is a graph over ranks: from a rank in an op that is not done to the members that have not entered
// it, or to the other side of a send or recv. Following the edges from the waiting ranks ends at ranks that wait for
// nobody: those hold up the others. Dead and stopped ranks wait for nobody, whatever their op log says. Where an edge
// leads out of what this report sees, or no end is found, the result is not clear.
//
// An op is *held* while its caller is inside the call or inside wait(). An op on a device lets the caller go on, and
// the log seldom learns that it is done; so an open op that is not held counts only where a member has not entered it.

namespace reft {

namespace {

// Nodes of the graph besides the ranks.
constexpr int kOutside = -1;  // some rank without evidence
constexpr int kNobody = -2;   // no rank: the op itself does not end

bool isPointToPoint(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kRecv || kind == OpKind::kRecvAnysource;
}

bool isCollective(OpKind kind) {
  return kind != OpKind::kUnknown && kind != OpKind::kStep && kind != OpKind::kCoalesced && !isPointToPoint(kind);
}

// On a device, or not: enqueued, and the caller has waited for it as far as it had to.
bool mayRunOnDevice(const OpEntry& op) {
  return words::isOpen(op) && op.wait_end_ns != 0;
}

// What the evidence says about one rank's part in one group.
struct Member {
  const RankEvidence* evidence;
  int32_t group_rank;
  int32_t group_size;
  uint32_t newest_seq = 0;  // newest collective entered
  bool log_reaches = true;  // false: no collective of this group is in sight, but there may have been some
  std::map<uint32_t, const OpEntry*> collectives = {};
  std::vector<const OpEntry*> held_point_to_point = {};
};

using Members = std::map<int, Member>;  // by global rank

std::map<std::string, Members> membersByGroup(const HangEvidence& evidence) {
  std::map<std::string, Members> groups;
  for (const RankEvidence& rank : evidence.ranks) {
    for (const OpGroup& group : rank.groups) {
      groups[words::groupName(group)].insert_or_assign(rank.rank, Member{&rank, group.rank, group.size});
    }
    const bool whole_log = rank.ops_begun <= rank.tail.size();
    for (const OpEntry& op : rank.tail) {
      if (op.group >= rank.groups.size()) {
        continue;
      }
      Member& member = groups[words::groupName(rank.groups[op.group])].at(rank.rank);
      if (isCollective(op.kind)) {
        member.newest_seq = std::max(member.newest_seq, op.seq);
        member.collectives[op.seq] = &op;
      } else if (isPointToPoint(op.kind) && words::isHeld(op)) {
        member.held_point_to_point.push_back(&op);
      }
    }
    for (const OpGroup& group : rank.groups) {
      Member& member = groups[words::groupName(group)].at(rank.rank);
      member.log_reaches = whole_log || member.newest_seq > 0;
    }
  }
  return groups;
}

bool outOfAction(const RankEvidence& rank) {
  return !rank.alive || rank.proc_state == "T" || rank.proc_state == "t";
}

class Analysis {
 public:
  explicit Analysis(const HangEvidence& evidence) : evidence_(evidence) {
    for (const RankEvidence& rank : evidence.ranks) {
      by_rank_.insert_or_assign(rank.rank, &rank);
    }
  }

  FirstSuspects run() {
    for (const auto& [rank, evidence] : by_rank_) {
      if (outOfAction(*evidence)) {
        SuspectGroup found;
        found.finding = evidence->alive ? "stopped" : "dead";
        found.text = words::rankList({rank});
        found.text += evidence->alive ? " is stopped (state " + evidence->proc_state + ")"
                                      : " is dead (pid " + std::to_string(evidence->pid) + ")";
        result_.groups.push_back(std::move(found));
        ends_.insert(rank);
      }
    }
    for (const auto& [name, members] : membersByGroup(evidence_)) {
      addCollectives(name, members);
      addPointToPoint(name, members);
    }
    addCoalesced();
    conclude();
    return std::move(result_);
  }

 private:
  void addEdge(int from, int to) {
    if (!outOfAction(*by_rank_.at(from))) {
      edges_[from].insert(to);
    }
  }

  // Where a rank that has not entered an op is instead.
  std::string whereabouts(int rank) const {
    const RankEvidence& evidence = *by_rank_.at(rank);
    if (!evidence.alive) {
      return "it is dead";
    }
    if (outOfAction(evidence)) {
      return "it is stopped (state " + evidence.proc_state + ")";
    }
    std::string text;
    for (auto op = evidence.tail.rbegin(); op != evidence.tail.rend(); ++op) {
      if (op->kind != OpKind::kStep && words::isHeld(*op)) {
        text = "it is in " + words::opName(*op, evidence);
        break;
      }
    }
    const std::string place = words::mainThreadPlace(evidence);
    if (!place.empty()) {
      text += (text.empty() ? "its main thread is at " : ", at ") + place;
    }
    return text.empty() ? "where it is instead is not known" : text;
  }

  // The ops of a group that are worth looking at: where members are held, and the first that a member has not entered.
  static std::set<uint32_t> questionable(const Members& members) {
    std::set<uint32_t> result;
    std::optional<uint32_t> slowest;
    for (const auto& [rank, member] : members) {
      if (member.log_reaches) {
        slowest = std::min(slowest.value_or(member.newest_seq), member.newest_seq);
      }
      for (const auto& [seq, op] : member.collectives) {
        if (words::isHeld(*op)) {
          result.insert(seq);
          break;
        }
      }
    }
    std::optional<uint32_t> first_missed;  // by the slowest member, as far as the logs of the others show
    for (const auto& [rank, member] : members) {
      const auto next = slowest ? member.collectives.upper_bound(*slowest) : member.collectives.end();
      if (next != member.collectives.end()) {
        first_missed = std::min(first_missed.value_or(next->first), next->first);
      }
    }
    if (first_missed) {
      // Ranks that are held further on wait behind it.
      result.erase(result.upper_bound(*first_missed), result.end());
      result.insert(*first_missed);
    }
    return result;
  }

  void addCollectives(const std::string& name, const Members& members) {
    for (const uint32_t seq : questionable(members)) {
      addCollective(name, members, seq);
    }
  }

  void addCollective(const std::string& name, const Members& members, uint32_t seq) {
    SuspectGroup found;
    found.group = name;
    found.seq = seq;
    std::map<std::string, std::vector<int>> kinds;  // by what the ranks call
    std::map<uint64_t, std::vector<int>> signatures;
    int64_t size = 0;
    for (const auto& [rank, member] : members) {
      size = std::max<int64_t>(size, member.group_size);
      const auto op = member.collectives.find(seq);
      if (op != member.collectives.end()) {
        kinds[opKindName(op->second->kind)].push_back(rank);
        if (op->second->signature != 0) {
          signatures[op->second->signature].push_back(rank);
        }
      } else if (!member.log_reaches) {
        found.unknown.push_back(rank);
      } else if (member.newest_seq < seq) {
        found.not_entered.push_back(rank);
      }
    }
    bool behind = false;
    for (const auto& [rank, member] : members) {
      const auto op = member.collectives.lower_bound(seq);
      bool held = op != member.collectives.end() && op->first == seq && words::isHeld(*op->second);
      if (!found.not_entered.empty() && !held) {
        // Later ops of the group wait behind this one, which may be over for this rank (as for a broadcast's root).
        const auto later = std::find_if(op, member.collectives.end(), [](const auto& entry) {
          return words::isHeld(*entry.second) || mayRunOnDevice(*entry.second);
        });
        held = later != member.collectives.end();
        behind = behind || (held && later->first != seq);
      }
      if (held) {
        found.waiting.push_back(rank);
      }
    }
    found.elsewhere = std::max<int64_t>(0, size - static_cast<int64_t>(members.size()));
    if (found.waiting.empty()) {
      return;  // nobody waits for it
    }
    found.op = kinds.begin()->first;
    const std::string op_text = found.op + " seq " + std::to_string(seq) + " of group " + name;
    for (const int rank : found.waiting) {
      for (const int missing : found.not_entered) {
        addEdge(rank, missing);
      }
      if (!found.unknown.empty() || found.elsewhere > 0) {
        addEdge(rank, kOutside);
      } else if (found.not_entered.empty()) {
        addEdge(rank, kNobody);
      }
    }
    found.text = words::rankList(found.waiting) + (found.waiting.size() == 1 ? " waits" : " wait") +
                 (behind ? " in or behind " : " in ") + op_text;
    if (kinds.size() > 1 || signatures.size() > 1) {
      found.finding = "mismatch";
      found.text = "ranks disagree about seq " + std::to_string(seq) + " of group " + name + ":";
      if (kinds.size() > 1) {
        for (const auto& [kind, ranks] : kinds) {
          found.text += " " + words::rankList(ranks) + (ranks.size() == 1 ? " calls " : " call ") + kind + ";";
        }
      } else {
        found.text += " all call " + found.op + ", with other sizes or types:";
        for (const auto& [signature, ranks] : signatures) {
          const OpEntry& op = *members.at(ranks.front()).collectives.at(seq);
          found.text += " " + words::rankList(ranks) + " " + words::bytes(op.bytes) + ";";
        }
      }
      mismatch_ = true;
    } else if (!found.not_entered.empty()) {
      found.finding = "not_entered";
    } else {
      found.finding = "all_wait";
      if (found.unknown.empty() && found.elsewhere == 0) {
        found.text += "; every member has entered it";
        stuck_inside_ = true;
      }
    }
    size_t told = 0;
    for (const int rank : found.not_entered) {
      if (++told > 8) {
        found.text += "; and " + std::to_string(found.not_entered.size() - 8) + " more have not entered it";
        break;
      }
      found.text += "; rank " + std::to_string(rank) + " has not entered it: " + whereabouts(rank);
    }
    if (!found.unknown.empty()) {
      found.text += "; the log of " + words::rankList(found.unknown) + " does not reach back to this group";
    }
    if (found.elsewhere > 0) {
      found.text += "; " + std::to_string(found.elsewhere) + (found.elsewhere == 1 ? " member is" : " members are") +
                    " not visible from this node";
    }
    result_.groups.push_back(std::move(found));
  }

  void addPointToPoint(const std::string& name, const Members& members) {
    std::map<int32_t, int> global;  // group rank → rank
    for (const auto& [rank, member] : members) {
      global.insert_or_assign(member.group_rank, rank);
    }
    for (const auto& [rank, member] : members) {
      for (const OpEntry* op : member.held_point_to_point) {
        SuspectGroup found;
        found.finding = "point_to_point";
        found.group = name;
        found.op = opKindName(op->kind);
        found.seq = op->seq;
        found.waiting = {rank};
        found.text = "rank " + std::to_string(rank) + " waits in " + words::opName(*op, *member.evidence);
        const auto peer = op->kind == OpKind::kRecvAnysource ? global.end() : global.find(op->peer);
        if (peer == global.end()) {
          addEdge(rank, kOutside);
          found.elsewhere = 1;
          found.text +=
              op->kind == OpKind::kRecvAnysource ? " from any rank" : "; that rank is not visible from this node";
        } else {
          const Member& other = members.at(peer->second);
          found.text += " (rank " + std::to_string(peer->second) + ")";
          const int32_t own_group_rank = member.group_rank;
          const bool matched = std::any_of(other.held_point_to_point.begin(), other.held_point_to_point.end(),
                                           [&](const OpEntry* theirs) {
                                             return theirs->peer == own_group_rank && theirs->tag == op->tag &&
                                                    (theirs->kind == OpKind::kSend) != (op->kind == OpKind::kSend);
                                           });
          if (matched) {
            found.text += ", which is in the matching op";
            addEdge(rank, kNobody);
            stuck_inside_ = true;
          } else {
            addEdge(rank, peer->second);
            found.text += "; " + whereabouts(peer->second);
          }
        }
        result_.groups.push_back(std::move(found));
      }
    }
  }

  void addCoalesced() {
    for (const RankEvidence& rank : evidence_.ranks) {
      for (const OpEntry& op : rank.tail) {
        if (op.kind == OpKind::kCoalesced && words::isHeld(op)) {
          SuspectGroup found;
          found.finding = "coalesced";
          found.group = words::groupName(rank, op.group);
          found.op = opKindName(op.kind);
          found.seq = op.seq;
          found.waiting = {rank.rank};
          found.text = "rank " + std::to_string(rank.rank) + " waits in " + words::opName(op, rank) +
                       ", whose members the log does not tell";
          addEdge(rank.rank, kOutside);
          result_.groups.push_back(std::move(found));
        }
      }
    }
  }

  void conclude() {
    std::set<int> seen;
    bool outside = false;
    std::vector<int> open;
    for (const auto& [rank, to] : edges_) {
      open.push_back(rank);
    }
    while (!open.empty()) {
      const int rank = open.back();
      open.pop_back();
      if (!seen.insert(rank).second) {
        continue;
      }
      const auto next = edges_.find(rank);
      if (rank == kOutside) {
        outside = true;
      } else if (rank == kNobody) {
        continue;
      } else if (next == edges_.end()) {
        ends_.insert(rank);
      } else {
        open.insert(open.end(), next->second.begin(), next->second.end());
      }
    }
    result_.ranks.assign(ends_.begin(), ends_.end());
    result_.clear = !ends_.empty() && !outside && !mismatch_ && !stuck_inside_;
    if (result_.clear) {
      const char* what = edges_.empty()              ? ": nobody is seen to wait for anything else"
                         : result_.ranks.size() == 1 ? ": the other ranks wait for it"
                                                     : ": the other ranks wait for them";
      result_.text = words::rankList(result_.ranks) + what;
    } else if (mismatch_) {
      result_.text = "not clear: ranks disagree about an op; who is wrong cannot be told from the log";
    } else if (!ends_.empty()) {
      result_.text = words::rankList(result_.ranks) + ", but not clear: " +
                     (outside ? "other ranks that are not seen here may hold up the job, too"
                              : "an op that every member has entered does not end either");
    } else if (outside) {
      result_.text = "not clear: the ranks here wait for ranks that are not seen here";
    } else if (stuck_inside_) {
      result_.text =
          "not clear: every member has entered the op and it does not end; a network or device may be at fault";
    } else if (!edges_.empty()) {
      result_.text = "not clear: ranks wait for each other in a circle";
    } else {
      result_.text = "not clear: no rank waits in an op; the stacks show where each one is";
    }
  }

  const HangEvidence& evidence_;
  std::map<int, const RankEvidence*> by_rank_;
  std::map<int, std::set<int>> edges_;
  std::set<int> ends_;
  bool mismatch_ = false;
  bool stuck_inside_ = false;
  FirstSuspects result_;
};

}  // namespace

FirstSuspects firstSuspects(const HangEvidence& evidence) {
  return Analysis(evidence).run();
}

}  // namespace reft
