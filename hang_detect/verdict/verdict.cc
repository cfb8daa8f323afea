#include "hang_detect/verdict/verdict.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "hang_detect/evidence/oom_kills.h"
#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"

// Note [wait-for graph]
// Nodes are ranks and ops. A rank that is held in collective n of a group points to that op, and
// the op to the members that have not begun it; a rank in a receive points to the sender, in a send
// to the receiver. All that a node points to must happen before it goes on. So the ranks at the end
// of the edges, which wait for nobody, hold up the job, whatever part of it waits behind them; and
// ranks in a circle hold up each other for good. Dead and stopped ranks wait for nobody, whatever
// their op log says, and are waited for by those who share an open op with them.
//
// An op is *held* while its caller is inside the call or inside wait(); or, without such a mark,
// while the main thread stands where futures are waited for: DDP asks each op for its future, and
// waits for them at the end of backward. An op on a device lets the caller go on, and the log
// seldom learns that it is done; so an open op that is not held counts only where a member has not
// begun it, and not if the stack shows that the rank is about something else.
//
// Where ranks disagree about what op n of a group is, the numbers after n mean nothing: that is
// looked at first. Where an edge leads out of what is seen, where ends and circles are both found,
// or where two sides are equally likely, the verdict is `undecidable`.

namespace reft {

namespace {

constexpr int64_t kNsPerMs = 1'000'000;
// Ranks whose ends were noticed within this time ended together: one of them cannot have been the
// other's cause.
constexpr int64_t kTogetherNs = 20 * kNsPerMs;
constexpr double kMomentSec = 0.5;  // no wait that is shorter says who is missing
constexpr double kStragglerSec =
    1;  // a wait that is no longer may be one of those that a slow rank causes
constexpr double kAskedSec = 10;  // "no progress" where no time was configured
constexpr double kHardCapFactor =
    10;  // after so many times that, even a rank that may be busy for good reason hangs
constexpr size_t kToldRanks = 8;
constexpr double kBusyShare = 0.5;
constexpr double kBusyShareOfACrowd =
    0.1;  // on a machine with more work than processors, and seen running
constexpr int64_t kMovingIoBytes = 64 << 10;

// Files and functions of Python debuggers and of prompts that a script opens. Not debugpy's own: a
// rank that was started by it has them at the bottom of its stack for ever.
const std::initializer_list<std::string_view> kPrompts = {
    "/pdb.py:",          "/bdb.py:",          "/ipdb/", "/pdbpp.py:", "_wait_suspend",
    "/code.py:interact", "/IPython/terminal/"};

bool stopped(const RankEvidence& rank) {
  return rank.alive && (rank.proc_state == "T" || rank.proc_state == "t");
}

bool outOfAction(const RankEvidence& rank) {
  return !rank.alive || stopped(rank);
}

bool contains(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [text](std::string_view part) { return text.find(part) != text.npos; });
}

std::string plural(size_t count, const char* one, const char* more) {
  return count == 1 ? one : more;
}

// One rank's part in one group.
struct Member {
  size_t rank = 0;  // index into the evidence
  int32_t group_rank = -1;
  uint32_t newest = 0;  // newest collective begun
  bool reaches =
      true;  // false: no collective of the group is in sight, but there may have been some
  std::vector<const OpEntry*> ops;  // collectives, by seq
  std::vector<const OpEntry*> p2p;  // oldest first
  const OpEntry* find(uint32_t seq) const {
    const auto at = from(seq);
    return at != ops.end() && (*at)->seq == seq ? *at : nullptr;
  }
  std::vector<const OpEntry*>::const_iterator from(uint32_t seq) const {
    return std::lower_bound(ops.begin(), ops.end(), seq,
                            [](const OpEntry* op, uint32_t n) { return op->seq < n; });
  }
};

struct Group {
  std::string name;
  int64_t size = 0;
  std::vector<Member> members;
  std::unordered_map<int32_t, size_t> by_group_rank;
  uint32_t disagree_from = 0;  // first op that the members disagree about; 0 = none
};

// ", whose worker pid 4711 stands at data.py:12 __getitem__": the first of the rank's data workers
// that is not idle.
std::string workerAtWork(const RankEvidence& rank) {
  for (const ChildProcess& child : rank.children) {
    const Stacks& stacks = child.stacks.parsed();
    for (const ThreadStack& thread : stacks.threads) {
      // A forked worker has the frames of the rank below its own loop.
      const auto loop =
          std::find_if(thread.frames.begin(), thread.frames.end(), [](const StackFrame& frame) {
            return frame.function == "_worker_loop" &&
                   frame.file.ends_with("data/_utils/worker.py");
          });
      ThreadStack own = thread;
      own.frames.assign(thread.frames.begin(), loop);
      const bool idle =
          std::all_of(own.frames.begin(), own.frames.end(),
                      [](const StackFrame& frame) { return isLibraryFile(frame.file); });
      if (thread.main && loop != thread.frames.end() && !idle) {
        return ", whose worker pid " + std::to_string(child.pid) + " stands at " + placeOf(own);
      }
    }
  }
  return "";
}

class Engine {
 public:
  explicit Engine(const HangEvidence& evidence) : evidence_(evidence), ranks_(evidence.ranks) {
    edges_.resize(ranks_.size());
    outside_.resize(ranks_.size());
    stuck_.resize(ranks_.size());
    place_.resize(ranks_.size(), Place::kNotLooked);
  }

  Verdict run() {
    index();
    nodes();
    disagreements();
    for (Group& group : groups_) {
      collectives(group);
      messages(group);
    }
    coalesced();
    victims();
    conclude();
    return std::move(result_);
  }

 private:
  // --- where ranks stand

  enum class Place : uint8_t {
    kNotLooked,
    kUnknown,    // no stack, or one that may wait for an op in a call that has no name
    kFutures,    // waits for whatever futures it took
    kElsewhere,  // waits for something that is no op
  };

  Place placeOf(size_t r) const {
    if (place_[r] == Place::kNotLooked) {
      place_[r] = look(ranks_[r]);
    }
    return place_[r];
  }

  static Place look(const RankEvidence& rank) {
    const Culprit place = describe(rank);
    const Stacks& stacks = rank.stacks.parsed();
    for (const ThreadStack& thread : stacks.threads) {
      if (thread.main && !thread.frames.empty()) {
        const StackFrame& top = thread.frames.front();
        // What backward() itself computes shows here, too, but not for long.
        if ((top.file.ends_with("torch/autograd/graph.py") &&
             top.function == "_engine_run_backward") ||
            (top.file.ends_with("torch/futures/__init__.py") &&
             (top.function == "wait" || top.function == "value"))) {
          return Place::kFutures;
        }
      }
    }
    const bool waits_otherwise =
        !place.reason.empty() && place.reason != "user_code" && place.reason != "busy";
    return waits_otherwise || contains(rank.wait_channel, {"nanosleep"}) ? Place::kElsewhere
                                                                         : Place::kUnknown;
  }

  bool held(size_t r, const OpEntry& op) const {
    return isHeld(op) || (isUnwaited(op) && placeOf(r) == Place::kFutures);
  }

  // --- the graph

  void index() {
    std::unordered_map<std::string, size_t> names;
    uint64_t newest = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankEvidence& rank = ranks_[r];
      std::vector<std::pair<size_t, size_t>> places;  // of the rank's groups: (group, member)
      GroupKeys keys;
      for (const OpGroup& group : rank.groups) {
        const std::string name = words::groupName(group);
        const auto [at, added] = names.emplace(keys.next(name), groups_.size());
        if (added) {
          groups_.emplace_back().name = name;
        }
        Group& mine = groups_[at->second];
        mine.size = std::max<int64_t>(mine.size, group.size);
        if (mine.members.empty() || mine.members.back().rank != r) {
          mine.by_group_rank[group.rank] = mine.members.size();
          Member& member = mine.members.emplace_back();
          member.rank = r;
          member.group_rank = group.rank;
        }
        places.emplace_back(at->second, mine.members.size() - 1);
      }
      for (const OpEntry& op : rank.tail) {
        if (op.group < places.size() && !hasUnknownGroup(op)) {
          Member& member = groups_[places[op.group].first].members[places[op.group].second];
          if (isCollective(op.kind)) {
            member.newest = std::max(member.newest, op.seq);
            member.ops.push_back(&op);
          } else if (isPointToPoint(op.kind)) {
            member.p2p.push_back(&op);
          }
        }
        if (rank.alive) {
          newest = std::max(
              {newest, op.begin_ns, op.enqueued_ns, op.wait_begin_ns, op.wait_end_ns, op.done_ns});
        }
      }
      const bool whole_log = rank.ops_begun <= rank.tail.size();
      for (const auto& [group, place] : places) {
        Member& member = groups_[group].members[place];
        member.reaches = whole_log || member.newest > 0;
        std::stable_sort(member.ops.begin(), member.ops.end(),
                         [](const OpEntry* a, const OpEntry* b) { return a->seq < b->seq; });
      }
      if (rank.alive && rank.heartbeat_age_ns > 0 &&
          rank.heartbeat_age_ns < static_cast<uint64_t>(evidence_.now_ns)) {
        newest = std::max(newest, static_cast<uint64_t>(evidence_.now_ns) - rank.heartbeat_age_ns);
      }
    }
    const auto now = static_cast<uint64_t>(evidence_.now_ns);
    result_.waited_sec = newest != 0 && newest < now ? static_cast<double>(now - newest) * 1e-9 : 0;
    if (evidence_.away_sec > 0) {
      result_.waited_sec = std::max(0.0, result_.waited_sec - evidence_.away_sec);
    }
  }

  // What is known of other nodes.
  void nodes() {
    std::vector<int> silent(evidence_.silent_nodes);
    std::sort(silent.begin(), silent.end());
    if (!silent.empty()) {
      result_.evidence.push_back(
          words::nodeList(silent) + plural(silent.size(), " does not answer", " do not answer") +
          plural(silent.size(), ": its ranks are not seen", ": their ranks are not seen"));
    }
    if (!evidence_.nodes_problem.empty()) {
      result_.evidence.push_back("other nodes: " + printable(evidence_.nodes_problem, 200));
    }
  }

  void disagreements() {
    for (Group& group : groups_) {
      std::unordered_map<uint32_t, const OpEntry*> first;
      std::set<uint32_t> odd;
      for (const Member& member : group.members) {
        for (const OpEntry* op : member.ops) {
          const auto [at, added] = first.emplace(op->seq, op);
          if (!added && !(contractOf(*at->second) == contractOf(*op))) {
            odd.insert(op->seq);
          }
        }
      }
      if (!odd.empty()) {
        group.disagree_from = *odd.begin();
        disagreement(group, *odd.begin());
      }
    }
  }

  void disagreement(const Group& group, uint32_t seq) {
    Disagreement found;
    found.group = group.name;
    found.seq = seq;
    std::map<OpContract, std::vector<size_t>> sides;
    std::map<size_t, const OpEntry*> op_of;
    for (const Member& member : group.members) {
      if (const OpEntry* op = member.find(seq)) {
        sides[contractOf(*op)].push_back(member.rank);
        op_of[member.rank] = op;
        found.ranks.push_back(ranks_[member.rank].rank);
      }
      found.waited_for = found.waited_for ||
                         std::any_of(member.from(seq), member.ops.end(), [&](const OpEntry* op) {
                           return held(member.rank, *op) || op->failed;
                         });
    }
    if (sides.size() < 2) {
      return;  // one rank's log holds two ops of the same number: damage
    }
    const auto most = std::max_element(
        sides.begin(), sides.end(),
        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
    const bool majority = static_cast<int64_t>(most->second.size()) * 2 > group.size;
    const OpEntry& usual = *op_of[most->second.front()];
    const bool reductions_differ = std::any_of(op_of.begin(), op_of.end(), [&](const auto& of) {
      return of.second->reduce_op != usual.reduce_op;
    });
    for (const auto& [face, side] : sides) {
      const OpEntry& op = *op_of[side.front()];
      if (!(face == most->first)) {
        if (majority) {
          for (const size_t rank : side) {
            found.minority.push_back(ranks_[rank].rank);
            odd_ranks_[found.group].push_back(rank);
          }
        }
        if (found.what.empty()) {
          found.what = op.kind != usual.kind || op.reduce_op != usual.reduce_op ? "op_mismatch"
                       : op.dtype != usual.dtype                                ? "dtype_mismatch"
                       : face.root != most->first.root                          ? "root_mismatch"
                                                                                : "size_mismatch";
        }
      }
      if (!majority) {
        odd_ranks_[found.group].insert(odd_ranks_[found.group].end(), side.begin(), side.end());
      }
      found.text +=
          (found.text.empty() ? "seq " + std::to_string(seq) + " of group " + group.name + ": "
                              : "; ") +
          words::rankList(numbers(side)) + plural(side.size(), " calls ", " call ") +
          opKindName(op.kind) + " (" + words::bytes(op.bytes) + ", " + words::dtypeName(op.dtype) +
          (reductions_differ ? ", " + words::reduceOpName(op.reduce_op) : "") +
          (face.root >= 0 ? ", root " + std::to_string(face.root) : "") + ")";
      if (const auto site = ranks_[side.front()].call_sites.find(op.call_site);
          site != ranks_[side.front()].call_sites.end()) {
        found.text += " at " + printable(site->second, 100);
      }
    }
    std::sort(found.minority.begin(), found.minority.end());
    std::sort(found.ranks.begin(), found.ranks.end());
    result_.disagreements.push_back(std::move(found));
  }

  // The ops of a group that are worth looking at: where members are held, and the first that a
  // member has not begun.
  std::set<uint32_t> questionable(const Group& group) const {
    std::set<uint32_t> result;
    std::optional<uint32_t> slowest, first_missed;
    for (const Member& member : group.members) {
      if (member.reaches) {
        slowest = std::min(slowest.value_or(member.newest), member.newest);
      }
      const auto first = std::find_if(member.ops.begin(), member.ops.end(),
                                      [&](const OpEntry* op) { return held(member.rank, *op); });
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
      result.erase(result.upper_bound(*first_missed),
                   result.end());  // who is held further on waits behind it
      result.insert(*first_missed);
    }
    return result;
  }

  void collectives(const Group& group) {
    for (const uint32_t seq : questionable(group)) {
      collective(group, seq);
    }
  }

  void collective(const Group& group, uint32_t seq) {
    std::vector<size_t> missing, unknown, waiting, gone_inside;
    const OpEntry* sample = nullptr;
    for (const Member& member : group.members) {
      const OpEntry* op = member.find(seq);
      if (op == nullptr && !member.reaches) {
        unknown.push_back(member.rank);
      } else if (op == nullptr && member.newest < seq) {
        missing.push_back(member.rank);
      } else if (op != nullptr && isOpen(*op) && outOfAction(ranks_[member.rank])) {
        gone_inside.push_back(member.rank);
      }
    }
    for (const Member& member : group.members) {
      if (outOfAction(ranks_[member.rank])) {
        continue;
      }
      const auto at = member.from(seq);
      bool waits = at != member.ops.end() && (*at)->seq == seq && held(member.rank, **at);
      if (!waits && !missing.empty()) {
        // Later ops of the group wait behind this one, which may be over for this rank (as for a
        // broadcast's root).
        waits = std::any_of(at, member.ops.end(), [&](const OpEntry* later) {
          return held(member.rank, *later) || mayRunOnDevice(*later) ||
                 (isUnwaited(*later) && placeOf(member.rank) != Place::kElsewhere);
        });
      }
      if (waits) {
        waiting.push_back(member.rank);
        sample = sample != nullptr ? sample : member.find(seq);
      }
    }
    const int64_t elsewhere = group.size - static_cast<int64_t>(group.members.size());
    if (waiting.empty()) {
      return;
    }
    const size_t node = addNode();
    for (const size_t rank : waiting) {
      edges_[rank].push_back(node);
    }
    edges_[node] = missing;
    edges_[node].insert(edges_[node].end(), gone_inside.begin(), gone_inside.end());
    outside_[node] = !unknown.empty() || elsewhere > 0;
    stuck_[node] = edges_[node].empty() && !outside_[node];
    const std::string op = sample == nullptr ? "an op" : opKindName(sample->kind);
    std::string text = words::rankList(numbers(waiting)) +
                       plural(waiting.size(), " waits in ", " wait in ") + op + " seq " +
                       std::to_string(seq) + " of group " + group.name;
    if (!missing.empty()) {
      text += "; not begun by " + words::rankList(numbers(missing));
    } else if (stuck_[node]) {
      text += "; every member has begun it";
    }
    if (!unknown.empty()) {
      text += "; the log of " + words::rankList(numbers(unknown)) +
              " does not reach back to this group";
    }
    if (elsewhere > 0) {
      text += "; " + std::to_string(elsewhere) +
              plural(static_cast<size_t>(elsewhere), " member is", " members are") +
              " not visible from this node";
    }
    told_.emplace_back(waiting.size(), text);
    if (waiting.size() > most_waiting_) {
      most_waiting_ = waiting.size();
      result_.group = group.name;
      result_.op = op;
      result_.seq = seq;
    }
  }

  // How many messages between the two, with this tag, the log of `member` shows up to `last` (all:
  // nullptr).
  static size_t countMessages(const Member& member, bool sends, int32_t peer, uint32_t tag,
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

  void messages(const Group& group) {
    for (const Member& member : group.members) {
      const RankEvidence& rank = ranks_[member.rank];
      if (outOfAction(rank)) {
        continue;
      }
      for (const OpEntry* op : member.p2p) {
        if (held(member.rank, *op)) {
          message(group, member, *op);
        }
      }
    }
  }

  void message(const Group& group, const Member& member, const OpEntry& op) {
    const RankEvidence& rank = ranks_[member.rank];
    const auto peer = op.kind == OpKind::kRecvAnysource ? group.by_group_rank.end()
                                                        : group.by_group_rank.find(op.peer);
    std::string text = "rank " + std::to_string(rank.rank) + " waits in " + words::opName(op, rank);
    if (most_waiting_ == 0) {
      most_waiting_ = 1;
      result_.group = group.name;
      result_.op = opKindName(op.kind);
      result_.seq = op.seq;
    }
    if (peer == group.by_group_rank.end()) {
      outside_[member.rank] = true;
      waits_.insert(member.rank);
      told_.emplace_back(
          1, text + (op.kind == OpKind::kRecvAnysource ? ", from any rank"
                                                       : ", not visible from this node"));
      return;
    }
    const Member& other = group.members[peer->second];
    const bool is_send = op.kind == OpKind::kSend;
    text += " (rank " + std::to_string(ranks_[other.rank].rank) + ")";
    waits_.insert(member.rank);
    const OpEntry* match = nullptr;
    const OpEntry* crossed = nullptr;
    for (const OpEntry* theirs : other.p2p) {
      if (isOpen(*theirs) && theirs->peer == member.group_rank &&
          (theirs->kind == OpKind::kSend) != is_send) {
        (theirs->tag == op.tag ? match : crossed) = theirs;
      }
    }
    const bool whole = rank.ops_begun <= rank.tail.size() &&
                       ranks_[other.rank].ops_begun <= ranks_[other.rank].tail.size();
    const bool served =
        whole && countMessages(other, !is_send, member.group_rank, op.tag, nullptr) >=
                     countMessages(member, is_send, op.peer, op.tag, &op);
    if (outOfAction(ranks_[other.rank])) {
      edges_[member.rank].push_back(other.rank);
    } else if (match != nullptr || served) {
      stuck_[member.rank] = true;
      text += match != nullptr ? ", which is in the matching op" : ", which has done its part";
      if (match != nullptr && match->signature != op.signature) {
        p2p_mismatch_.insert({member.rank, other.rank});
        text += " with another size or type (" + words::bytes(op.bytes) + " and " +
                words::bytes(match->bytes) + ")";
      }
    } else {
      edges_[member.rank].push_back(other.rank);
      if (crossed != nullptr) {
        p2p_mismatch_.insert({member.rank, other.rank});
        text += ", whose op with it has tag " + std::to_string(crossed->tag) + ", not " +
                std::to_string(op.tag);
      }
    }
    told_.emplace_back(1, text);
  }

  void coalesced() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const OpEntry& op : ranks_[r].tail) {
        if (op.kind == OpKind::kCoalesced && held(r, op) && !outOfAction(ranks_[r])) {
          outside_[r] = true;
          waits_.insert(r);
          told_.emplace_back(1,
                             "rank " + std::to_string(ranks_[r].rank) +
                                 " waits in a coalesced op, whose members the log does not tell");
        }
      }
    }
  }

  size_t addNode() {
    edges_.emplace_back();
    outside_.push_back(false);
    stuck_.push_back(false);
    return edges_.size() - 1;
  }

  void victims() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (!edges_[r].empty()) {
        waits_.insert(r);
      }
    }
    std::stable_sort(told_.begin(), told_.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    for (size_t i = 0; i < told_.size() && i < kToldRanks; ++i) {
      result_.evidence.push_back(told_[i].second);
    }
    if (told_.size() > kToldRanks) {
      result_.evidence.push_back("and " + std::to_string(told_.size() - kToldRanks) +
                                 " more such waits");
    }
  }

  // --- what the graph says

  struct Ends {
    std::set<size_t> sinks;
    std::vector<std::vector<size_t>> circles;  // ranks
    bool outside = false, stuck = false;
  };

  // Tarjan's strongly connected components, without recursion: a graph may be as deep as there are
  // ranks.
  Ends follow() const {
    Ends ends;
    const size_t count = edges_.size();
    constexpr size_t kUnseen = SIZE_MAX;
    std::vector<size_t> number(count, kUnseen), low(count), next(count);
    std::vector<bool> open(count);
    std::vector<size_t> stack, path;
    size_t counter = 0;
    for (const size_t start : waits_) {
      if (number[start] != kUnseen) {
        continue;
      }
      path.push_back(start);
      while (!path.empty()) {
        const size_t node = path.back();
        if (number[node] == kUnseen) {
          number[node] = low[node] = counter++;
          stack.push_back(node);
          open[node] = true;
          ends.outside = ends.outside || outside_[node];
          ends.stuck = ends.stuck || stuck_[node];
          if (node < ranks_.size() && edges_[node].empty() && !outside_[node] && !stuck_[node]) {
            ends.sinks.insert(node);
          }
        }
        if (next[node] < edges_[node].size()) {
          const size_t to = edges_[node][next[node]++];
          if (number[to] == kUnseen) {
            path.push_back(to);
          } else if (open[to]) {
            low[node] = std::min(low[node], number[to]);
          }
          continue;
        }
        path.pop_back();
        if (!path.empty()) {
          low[path.back()] = std::min(low[path.back()], low[node]);
        }
        if (low[node] == number[node]) {
          std::vector<size_t> members;
          size_t in_component = 0;
          for (size_t top = kUnseen; top != node; ++in_component) {
            top = stack.back();
            stack.pop_back();
            open[top] = false;
            if (top < ranks_.size()) {
              members.push_back(top);
            }
          }
          if (in_component > 1) {
            std::sort(members.begin(), members.end());
            ends.circles.push_back(std::move(members));
          }
        }
      }
    }
    return ends;
  }

  std::vector<int> numbers(const std::vector<size_t>& indices) const {
    std::vector<int> result;
    result.reserve(indices.size());
    for (const size_t index : indices) {
      result.push_back(ranks_[index].rank);
    }
    std::sort(result.begin(), result.end());
    return result;
  }

  // Ranks that ended uncleanly and not because an op of theirs failed: of those, the first.
  // `doubt_ns`: how wrong the times may be against each other.
  std::set<size_t> firstGone(int64_t doubt_ns) const {
    std::set<size_t> gone;
    int64_t first = INT64_MAX;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankEvidence& rank = ranks_[r];
      const bool op_failed =
          !rank.tail.empty() &&
          std::any_of(
              rank.tail.rbegin(),
              rank.tail.rbegin() + std::min<ptrdiff_t>(4, rank.tail.end() - rank.tail.begin()),
              [](const OpEntry& op) { return op.failed; });
      if (!rank.alive && !rank.said_bye && rank.pid > 0 && !op_failed) {
        gone.insert(r);
        first = std::min(first, rank.gone_ns > 0 ? rank.gone_ns : INT64_MAX);
      }
    }
    if (first != INT64_MAX) {
      std::erase_if(gone,
                    [&](size_t r) { return ranks_[r].gone_ns - first > kTogetherNs + doubt_ns; });
    }
    return gone;
  }

  void conclude() {
    // The newest mark is older than what is suspicious. (A NaN is no time.)
    still_ =
        result_.waited_sec >= (evidence_.suspect_sec > 0 ? evidence_.suspect_sec * 0.9 : kAskedSec);
    hard_ = result_.waited_sec >=
            (evidence_.suspect_sec > 0 ? evidence_.suspect_sec : kAskedSec) * kHardCapFactor;
    const Ends ends = follow();
    const std::set<size_t> gone = firstGone(std::max<int64_t>(0, evidence_.clock_error_ns));
    const bool all_gone = std::none_of(ranks_.begin(), ranks_.end(),
                                       [](const RankEvidence& rank) { return rank.alive; });
    const auto odd = std::find_if(result_.disagreements.begin(), result_.disagreements.end(),
                                  [](const Disagreement& found) { return found.waited_for; });
    // Out of action is out of action, whatever the ops say; but a rank may have died because of a
    // disagreement. Who died in that very op did: a transport ends a process that gets more bytes
    // than it expects.
    std::set<size_t> out(gone);
    if (odd != result_.disagreements.end()) {
      std::erase_if(out, [&](size_t rank) { return endedIn(rank, *odd); });
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (stopped(ranks_[r]) && (ends.sinks.count(r) != 0 || waits_.empty())) {
        out.insert(r);
      }
    }
    if (odd != result_.disagreements.end() && out.empty()) {
      disagree(*odd);
    } else if (!gone.empty() && all_gone && gone.size() == ranks_.size()) {
      finish(VerdictState::kHealthy, "ended", "P4", Confidence::kUndecidable, {});
      result_.evidence.emplace_back("all ranks ended together, without a clean end");
    } else if (!gone.empty() && odd == result_.disagreements.end()) {
      std::set<size_t> named(out);
      for (const size_t sink : ends.sinks) {
        if (!outOfAction(ranks_[sink])) {
          continue;  // it may be on its way to the op that fails
        }
        if (ranks_[sink].said_bye) {
          named.insert(sink);
        }
      }
      // Somebody on a node that does not answer may have gone before them; and clocks of nodes may
      // differ by more than ends do.
      const bool open = !evidence_.silent_nodes.empty() || gone.size() > firstGone(0).size();
      finish(VerdictState::kHang, named.size() > gone.size() ? "gone_and_stopped" : "dead", "P4",
             open           ? Confidence::kUndecidable
             : ends.outside ? Confidence::kLikely
                            : Confidence::kCertain,
             named);
    } else if (!out.empty() && odd != result_.disagreements.end()) {
      for (const size_t rank : odd_ranks_[odd->group]) {
        out.insert(rank);
      }
      finish(VerdictState::kHang, odd->what, "P2", Confidence::kUndecidable, out);
    } else if (!still_ && out.empty() && straggler()) {
      result_.evidence.emplace_back("the job goes on");
    } else if (!still_ && out.empty() && passing()) {
      finish(VerdictState::kHealthy, "progressing", "P0", Confidence::kUndecidable, {});
      result_.evidence.emplace_back("whoever waits in an op has begun it just now");
    } else if (!ends.sinks.empty()) {
      waitForSinks(ends);
    } else if (!out.empty()) {
      finish(VerdictState::kSlow, "stopped", "P1", Confidence::kLikely, out);
    } else if (!ends.circles.empty()) {
      circle(ends);
    } else if (!p2p_mismatch_.empty()) {
      std::set<size_t> pair;
      for (const auto& [a, b] : p2p_mismatch_) {
        pair.insert({a, b});
      }
      finish(timed(), "p2p_mismatch", "P2", Confidence::kUndecidable, pair);
    } else if (ends.stuck) {
      // A group's first op makes its communicator, and a huge tensor takes its time.
      const bool excused = still_ && !hard_ && !familiar();
      finish(excused ? VerdictState::kSlow : timed(), "all_in", "P3", Confidence::kUndecidable, {});
      result_.evidence.emplace_back(excused ? "every member has begun the op, where they never "
                                              "waited before: it is taken for slow, not for hung"
                                            : "every member has begun the op and it does not end: "
                                              "a network or a device may be at fault");
    } else if (ends.outside) {
      finish(timed(), "elsewhere", "P1", Confidence::kUndecidable, {});
      result_.evidence.emplace_back(evidence_.silent_nodes.empty()
                                        ? "ranks here wait for ranks that are not seen from here"
                                        : "ranks wait for ranks of which nothing is known");
    } else if (std::any_of(ranks_.begin(), ranks_.end(), [](const RankEvidence& rank) {
                 return !rank.alive && !rank.said_bye && rank.pid > 0;
               })) {
      finish(VerdictState::kHang, "collective_failed", "P4", Confidence::kUndecidable, {});
      result_.evidence.emplace_back("ranks ended because an op failed, and none ended before them");
    } else {
      finish(VerdictState::kHealthy, still_ ? "outside" : "progressing", still_ ? "P7" : "P0",
             Confidence::kUndecidable, {});
      result_.evidence.emplace_back("no rank waits in an op");
    }
    for (const Disagreement& found : result_.disagreements) {
      result_.evidence.push_back("ranks disagree: " + found.text);
    }
  }

  bool endedIn(size_t rank, const Disagreement& found) {
    for (const Group& group : groups_) {
      for (const Member& member : group.members) {
        const OpEntry* op =
            group.name == found.group && member.rank == rank ? member.find(found.seq) : nullptr;
        if (op != nullptr && op->done_ns == 0) {
          result_.evidence.push_back("rank " + std::to_string(ranks_[rank].rank) +
                                     " ended in seq " + std::to_string(found.seq) + " of group " +
                                     found.group);
          return true;
        }
      }
    }
    return false;
  }

  VerdictState timed() const { return still_ ? VerdictState::kHang : VerdictState::kSlow; }

  void disagree(const Disagreement& found) {
    const std::vector<size_t>& ranks = odd_ranks_[found.group];
    const bool named = !found.minority.empty();
    const bool failed = std::any_of(ranks_.begin(), ranks_.end(),
                                    [](const RankEvidence& rank) { return !rank.alive; });
    finish(failed ? VerdictState::kHang : timed(), found.what, "P2",
           named ? Confidence::kLikely : Confidence::kUndecidable, {ranks.begin(), ranks.end()});
    result_.group = found.group;
    result_.seq = found.seq;
    for (Culprit& culprit : named ? result_.culprits : result_.candidates) {
      culprit.reason = found.what;
      culprit.text = "rank " + std::to_string(culprit.rank) +
                     (named ? " differs from the others in " : " is one side of ") + "seq " +
                     std::to_string(found.seq) + " of group " + found.group;
    }
  }

  void waitForSinks(const Ends& ends) {
    bool all_out = true;
    std::set<size_t> named(ends.sinks);
    for (const size_t sink : ends.sinks) {
      all_out = all_out && outOfAction(ranks_[sink]);
    }
    bool undecidable = (ends.outside || ends.stuck) && !all_out;
    if (!ends.circles.empty()) {
      for (const auto& ranks : ends.circles) {
        named.insert(ranks.begin(), ranks.end());
      }
      undecidable = true;
    }
    finish(timed(), "missing", "P1",
           undecidable    ? Confidence::kUndecidable
           : ends.outside ? Confidence::kLikely
                          : Confidence::kCertain,
           named);
    std::vector<Culprit>& list = undecidable ? result_.candidates : result_.culprits;
    result_.could_come = std::none_of(list.begin(), list.end(), cannotCome);
    // The others wait for all of them: one that is at work explains it, unless another cannot come
    // at all.
    const bool excused = std::any_of(list.begin(), list.end(),
                                     [this](const Culprit& culprit) { return excuse(culprit); }) &&
                         result_.could_come;
    result_.at_work = excused;
    if (!list.empty() && std::all_of(list.begin(), list.end(), [&](const Culprit& c) {
          return c.reason == list.front().reason;
        })) {
      result_.what = list.front().reason;
    }
    if (excused && !hard_ && result_.state == VerdictState::kHang) {
      result_.state = VerdictState::kSlow;
      result_.pattern = "P0";
      result_.evidence.emplace_back(
          "whoever is waited for seems to be at work; it is taken for slow, not for hung");
    }
  }

  static bool cannotCome(const Culprit& culprit) {
    return culprit.reason == "dead" || culprit.reason == "stopped" ||
           culprit.reason == "ended_early" || culprit.reason == "debugger";
  }

  // True if what the rank does is known to take long in healthy jobs, or nothing says that it is
  // unusual.
  bool excuse(const Culprit& culprit) const {
    if (culprit.reason == "compiling" || culprit.reason == "traced" ||
        culprit.reason == "profiling") {
      return true;
    }
    const RankEvidence& rank =
        *std::find_if(ranks_.begin(), ranks_.end(),
                      [&](const RankEvidence& r) { return r.rank == culprit.rank; });
    if (cannotCome(culprit)) {
      return false;
    }
    if (rank.io_bytes >= kMovingIoBytes && culprit.reason != "data_loading") {
      return true;
    }
    return !familiar();
  }

  // A place of the program, as far as all ranks mean the same by it.
  using Site = std::tuple<OpKind, uint32_t, uint64_t, int32_t>;
  static Site siteOf(const RankEvidence& rank, const OpEntry& op) {
    return {op.kind, op.call_site, op.bytes,
            op.group < rank.groups.size() ? rank.groups[op.group].size : 0};
  }

  // Whether some rank waits at a place where it was before, and no rank ever was for nearly as
  // long. Else the job may be in a phase that it has not been in, as the first step, an evaluation
  // or an export. What one rank has waited is not enough to go by: who mostly comes last has never
  // waited anywhere.
  bool familiar() const {
    std::map<Site, uint64_t> longest;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const OpEntry& op : ranks_[r].tail) {
        if (op.kind != OpKind::kStep && !op.failed && op.done_ns > op.begin_ns) {
          uint64_t& most = longest[siteOf(ranks_[r], op)];
          most = std::max(most, op.done_ns - op.begin_ns);
        }
      }
    }
    for (const size_t r : waits_) {
      const RankEvidence& rank = ranks_[r];
      for (const OpEntry& open : rank.tail) {
        if (open.kind == OpKind::kStep || !held(r, open)) {
          continue;
        }
        const Site site = siteOf(rank, open);
        const auto before =
            std::count_if(rank.tail.begin(), rank.tail.end(), [&](const OpEntry& op) {
              return siteOf(rank, op) == site && !held(r, op) && !op.failed;
            });
        const auto most = longest.find(site);
        const double most_sec =
            most == longest.end() ? 0 : static_cast<double>(most->second) * 1e-9;
        if (before >= 3 && most_sec * 4 < result_.waited_sec) {
          return true;
        }
      }
    }
    return false;
  }

  // What a rank did since the newest op of the largest group that all its members began, as words
  // that mean the same on all ranks: the op and how many take part.
  using Program = std::vector<std::pair<OpKind, int64_t>>;
  Program programSince(size_t r, const std::string& group, uint32_t seq) const {
    Program program;
    bool after = false;
    const RankEvidence& rank = ranks_[r];
    for (const OpEntry& op : rank.tail) {
      if (op.group >= rank.groups.size() || op.kind == OpKind::kStep) {
        continue;
      }
      if (after) {
        program.emplace_back(op.kind, isPointToPoint(op.kind) ? 0 : rank.groups[op.group].size);
      }
      after = after || (isCollective(op.kind) && op.seq == seq &&
                        words::groupName(rank.groups[op.group]) == group);
    }
    return program;
  }

  // The ranks in the circles whose order of ops is not the one that at least two thirds of all
  // ranks share.
  std::set<size_t> deviants(const std::set<size_t>& inside) const {
    const Group* largest = nullptr;
    for (const Group& group : groups_) {
      if (largest == nullptr || group.members.size() > largest->members.size()) {
        largest = &group;
      }
    }
    if (largest == nullptr || largest->members.size() < 3 ||
        (!evidence_.silent_nodes.empty() &&
         static_cast<int64_t>(largest->members.size()) < largest->size)) {
      return {};
    }
    uint32_t common = UINT32_MAX;
    for (const Member& member : largest->members) {
      common = std::min(common, member.newest);
    }
    std::map<Program, size_t> count;
    std::map<size_t, Program> programs;
    for (const Member& member : largest->members) {
      programs[member.rank] = programSince(member.rank, largest->name, common);
      ++count[programs[member.rank]];
    }
    if (common == 0 || count.size() > 16) {
      return {};  // stages of a pipeline differ by nature
    }
    const auto isPrefix = [](const Program& a, const Program& b) {
      return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin());
    };
    size_t best_count = 0;
    const Program* best = nullptr;
    for (const auto& [program, own] : count) {
      size_t supporters = 0;
      for (const auto& [other, times] : count) {
        supporters += isPrefix(other, program) ? times : 0;
      }
      if (!program.empty() && (supporters > best_count)) {
        best_count = supporters;
        best = &program;
      }
    }
    std::set<size_t> result;
    // Nobody has gone the whole way while only one did: then "the usual order" is one rank's word.
    if (best == nullptr || best_count * 3 < largest->members.size() * 2 || count[*best] < 2) {
      return {};
    }
    for (const auto& [rank, program] : programs) {
      if (!isPrefix(program, *best)) {
        if (inside.count(rank) == 0) {
          return {};  // somebody outside the circle differs, too: the comparison does not mean what
                      // it should
        }
        result.insert(rank);
      }
    }
    return result.size() * 2 < inside.size() + 1 ? result : std::set<size_t>{};
  }

  void circle(const Ends& ends) {
    std::set<size_t> ranks;
    for (const auto& members : ends.circles) {
      ranks.insert(members.begin(), members.end());
    }
    std::string what = "cycle";
    if (ranks.size() == 2 || std::all_of(ranks.begin(), ranks.end(), [this](size_t r) {
          return heldKind(r) == OpKind::kRecv || heldKind(r) == OpKind::kSend;
        })) {
      const bool sends = std::all_of(ranks.begin(), ranks.end(),
                                     [this](size_t r) { return heldKind(r) == OpKind::kSend; });
      const bool recvs = std::all_of(ranks.begin(), ranks.end(),
                                     [this](size_t r) { return heldKind(r) == OpKind::kRecv; });
      what = sends ? "crossed_sends" : recvs ? "crossed_recvs" : what;
    }
    if (!p2p_mismatch_.empty()) {
      what = "p2p_mismatch";
    } else if (what == "cycle" && std::any_of(ranks.begin(), ranks.end(), [this](size_t r) {
                 return isPointToPoint(heldKind(r));
               })) {
      what = "p2p_count_mismatch";
    }
    const std::set<size_t> odd =
        ends.outside || what != "cycle" ? std::set<size_t>{} : deviants(ranks);
    std::vector<size_t> list(ranks.begin(), ranks.end());
    finish(timed(), what, what == "p2p_mismatch" ? "P2" : "P6",
           odd.empty() ? Confidence::kUndecidable : Confidence::kLikely, odd.empty() ? ranks : odd);
    result_.evidence.push_back(words::rankList(numbers(list)) + " wait for each other in a circle");
    for (Culprit& culprit : odd.empty() ? result_.candidates : result_.culprits) {
      culprit.reason = what;
      culprit.text =
          "rank " + std::to_string(culprit.rank) +
          (odd.empty() ? " is part of the circle" : " has another order of ops than the others") +
          whereInOp(culprit.rank);
    }
  }

  OpKind heldKind(size_t r) const {
    for (auto op = ranks_[r].tail.rbegin(); op != ranks_[r].tail.rend(); ++op) {
      if (op->kind != OpKind::kStep && held(r, *op)) {
        return op->kind;
      }
    }
    return OpKind::kUnknown;
  }

  std::string whereInOp(int number) const {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankEvidence& rank = ranks_[r];
      if (rank.rank != number) {
        continue;
      }
      for (auto op = rank.tail.rbegin(); op != rank.tail.rend(); ++op) {
        if (op->kind != OpKind::kStep && held(r, *op)) {
          const auto site = rank.call_sites.find(op->call_site);
          return ": it is in " + words::opName(*op, rank) +
                 (site == rank.call_sites.end() ? ""
                                                : ", called at " + printable(site->second, 100));
        }
      }
    }
    return "";
  }

  // Where ranks stand at an instant says who is last this time, no more: it takes a wait of some
  // length to say more.
  bool passing() const {
    bool waits = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const OpEntry& op : ranks_[r].tail) {
        if (op.kind != OpKind::kStep && held(r, op)) {
          waits = true;
          if (static_cast<double>(evidence_.now_ns) - static_cast<double>(op.begin_ns) >
              kMomentSec * 1e9) {
            return false;
          }
        }
      }
    }
    return waits;
  }

  // The job goes on: is there a rank that the others wait for, most of the time that they wait? The
  // last to come to a collective spends the least time in it, and the others' time in it is put
  // down to that rank. Clocks of different hosts are not compared.
  bool straggler() {
    struct Late {
      size_t times = 0;
      double waited_sec = 0;  // by the others
    };
    std::map<size_t, Late> late;
    size_t seen = 0;
    double waited_sec = 0, span_sec = 0;
    for (const Group& group : groups_) {
      if (group.members.size() < 2 || static_cast<int64_t>(group.members.size()) < group.size) {
        continue;
      }
      const auto& ops = group.members.front().ops;
      for (const OpEntry* op : ops) {
        std::vector<std::pair<double, size_t>> took;
        for (const Member& member : group.members) {
          const OpEntry* theirs = member.find(op->seq);
          if (theirs == nullptr || theirs->done_ns <= theirs->begin_ns || theirs->failed) {
            break;
          }
          took.emplace_back(static_cast<double>(theirs->done_ns - theirs->begin_ns) * 1e-9,
                            member.rank);
        }
        if (took.size() != group.members.size()) {
          continue;
        }
        ++seen;
        std::sort(took.begin(), took.end());
        const double waited = took[took.size() / 2].first - took.front().first;
        waited_sec += waited;
        if (waited > took.front().first) {
          Late& entry = late[took.front().second];
          ++entry.times;
          entry.waited_sec += waited;
        }
      }
      if (!ops.empty() && ops.back()->begin_ns > ops.front()->begin_ns) {
        span_sec = std::max(
            span_sec, static_cast<double>(ops.back()->begin_ns - ops.front()->begin_ns) * 1e-9);
      }
    }
    for (const auto& [rank, entry] : late) {
      const double usual_sec = entry.waited_sec / static_cast<double>(entry.times);
      const bool longer_than_ever =
          result_.waited_sec > std::max(kStragglerSec, 4 * usual_sec);  // it may be about to hang
      if (span_sec > 0 && seen >= 8 && entry.times >= 4 && entry.waited_sec >= 0.7 * waited_sec &&
          entry.waited_sec >= 0.2 * span_sec && !longer_than_ever) {
        finish(VerdictState::kSlow, "straggler", "P0", Confidence::kLikely, {rank});
        result_.culprits.front().reason = "straggler";
        result_.culprits.front().text =
            "the others wait for rank " + std::to_string(ranks_[rank].rank) + " " +
            std::to_string(std::lround(std::min(100.0, 100 * entry.waited_sec / span_sec))) +
            " % of the time: it was last in " + std::to_string(entry.times) + " of " +
            std::to_string(seen) + " collectives, by " + words::seconds(usual_sec) + " on average";
        return true;
      }
    }
    return false;
  }

  // --- the result

  void finish(VerdictState state, std::string what, std::string pattern, Confidence confidence,
              const std::set<size_t>& ranks) {
    result_.state = state;
    result_.what = std::move(what);
    result_.pattern = std::move(pattern);
    result_.confidence = confidence;
    auto& list = confidence == Confidence::kUndecidable ? result_.candidates : result_.culprits;
    list.clear();
    for (const size_t rank : ranks) {
      list.push_back(describe(ranks_[rank]));
    }
    std::sort(list.begin(), list.end(),
              [](const Culprit& a, const Culprit& b) { return a.rank < b.rank; });
    result_.victims.clear();
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (waits_.count(r) != 0 && ranks.count(r) == 0) {
        result_.victims.push_back(ranks_[r].rank);
      }
    }
    std::sort(result_.victims.begin(), result_.victims.end());
    result_.victims.erase(std::unique(result_.victims.begin(), result_.victims.end()),
                          result_.victims.end());
  }

  static Culprit describe(const RankEvidence& rank) {
    Culprit culprit;
    culprit.rank = rank.rank;
    culprit.pid = rank.pid;
    culprit.host = rank.host;
    const std::string who = "rank " + std::to_string(rank.rank);
    std::string names;  // of the main thread's functions and files
    const Stacks& stacks = rank.stacks.parsed();
    const auto standsAt = [&culprit](const ThreadStack& thread) {
      culprit.thread = thread.thread;
      const auto own =
          std::find_if(thread.frames.begin(), thread.frames.end(),
                       [](const StackFrame& frame) { return !isLibraryFile(frame.file); });
      culprit.frame = own != thread.frames.end() ? *own : thread.frames.front();
    };
    std::string place, awaits_gil_of;
    bool holds_gil = false;
    for (const ThreadStack& thread : stacks.threads) {
      if (thread.main && !thread.frames.empty()) {
        standsAt(thread);
        place = reft::placeOf(thread);
        holds_gil = thread.holds_gil;
        awaits_gil_of = thread.awaits_gil_of;
        for (size_t i = 0; i < thread.frames.size() && i < 64; ++i) {
          names += thread.frames[i].file + ":" + thread.frames[i].function + "\n";
        }
        break;
      }
    }
    const auto keeper = std::find_if(
        stacks.threads.begin(), stacks.threads.end(), [&awaits_gil_of](const ThreadStack& thread) {
          return thread.holds_gil && thread.thread == awaits_gil_of && !thread.frames.empty();
        });
    const std::string at =
        (place.empty() ? "" : ", at " + place) + (holds_gil ? ", and holds the GIL" : "");
    const auto say = [&](const char* reason, const std::string& text) {
      culprit.reason = reason;
      culprit.text = who + " " + text;
    };
    const std::string top = names.substr(0, names.find('\n'));
    const auto dead_child =
        std::find_if(rank.children.begin(), rank.children.end(),
                     [](const ChildProcess& child) { return child.state == "Z"; });
    if (!rank.alive && rank.said_bye) {
      say("ended_early", "has left the job although others still wait for it");
    } else if (!rank.alive) {
      say("dead",
          "is dead (pid " + std::to_string(rank.pid) + "); " +
              (rank.oom_kills > 0 ? kOomKillText : "the launcher's log has its exit status"));
    } else if (rank.proc_state == "T") {
      say("stopped", "is stopped (SIGSTOP or a frozen shell job)" + at);
    } else if (rank.proc_state == "t" || rank.tracer_pid > 0) {
      say("traced", "is under a debugger or tracer, pid " + std::to_string(rank.tracer_pid) + at);
    } else if (rank.proc_state == "D") {
      say("uninterruptible", "is in the kernel and cannot be interrupted (" +
                                 printable(rank.wait_channel, 40) + ")" + at);
    } else if (contains(names, kPrompts)) {
      say("debugger", "stands at a debugger's prompt" + at);
    } else if (keeper != stacks.threads.end()) {
      // Wherever the main thread wants to go on, it cannot.
      standsAt(*keeper);
      say("waits_for_gil", "waits for the GIL, at " + place + ": thread " +
                               printable(keeper->name.empty() ? keeper->thread : keeper->name, 32) +
                               " holds the GIL at " + reft::placeOf(*keeper));
    } else if (contains(names, {"destroy_process_group", "threading.py:_shutdown", "atexit"})) {
      say("ended_early", "has left the training loop and is shutting down" + at);
    } else if (contains(names,
                        {"_try_get_data", "_next_data", "data/dataloader.py", "utils/data/"})) {
      say("data_loading",
          "waits for its data loader" +
              (dead_child != rank.children.end()
                   ? ", whose worker pid " + std::to_string(dead_child->pid) + " is dead"
                   : workerAtWork(rank)) +
              at);
    } else if (contains(names, {"torch/_dynamo/convert_frame.py",
                                "torch/_inductor/compile_fx.py:compile_fx",
                                "torch/_inductor/graph.py:", "torch/_inductor/async_compile.py",
                                "triton_heuristics.py:autotune", "/triton/compiler/",
                                "/triton/runtime/autotuner.py"})) {
      // Frames of compiled code that only runs are in those folders, too.
      say("compiling", "compiles" + at);
    } else if (contains(names, {"profiler/profiler.py", "autograd/profiler.py:__exit__"})) {
      say("profiling", "writes a profile" + at);
    } else if (contains(names, {"distributed/checkpoint", "serialization.py:save",
                                "serialization.py:_save", "serialization.py:load"})) {
      say("checkpoint_io", "is in checkpoint I/O" + at);
    } else if (contains(top, {"threading.py:join", "threading.py:_wait_for_tstate_lock"})) {
      say("waits_for_thread", "waits for a thread of its own" + at);
    } else if (contains(top, {"threading.py:wait", "threading.py:acquire", "queue.py:get",
                              "futures/_base.py", "synchronize.py"})) {
      say("waits_for_thread", "waits for another thread or process" + at);
    } else if (contains(names, {"subprocess.py"})) {
      say("waits_for_child", "waits for a process that it started" + at);
    } else if (rank.cpu_share >= kBusyShare ||
               (rank.proc_state == "R" && rank.cpu_share >= kBusyShareOfACrowd)) {
      say("busy", "is busy outside any op" + at);
    } else if (contains(rank.wait_channel, {"pipe_read", "pipe_wait", "fifo", "sk_wait",
                                            "unix_stream", "nfs", "fuse", "n_tty"})) {
      say("blocking_io", "is blocked in I/O (" + printable(rank.wait_channel, 40) + ")" + at);
    } else {
      say("user_code", "is outside any op" + at);
    }
    return culprit;
  }

  const HangEvidence& evidence_;
  const std::vector<RankEvidence>& ranks_;
  std::vector<Group> groups_;
  std::vector<std::vector<size_t>> edges_;  // ranks first, then ops
  std::vector<bool> outside_;               // waits for somebody who is not seen
  std::vector<bool> stuck_;                 // waits for nobody, and does not go on
  mutable std::vector<Place> place_;        // by rank, where it was looked for
  std::set<size_t> waits_;
  std::set<std::pair<size_t, size_t>> p2p_mismatch_;
  std::map<std::string, std::vector<size_t>> odd_ranks_;  // by group: the minority, or all sides
  std::vector<std::pair<size_t, std::string>> told_;      // (ranks that wait, sentence)
  size_t most_waiting_ = 0;
  bool still_ = false, hard_ = false;
  Verdict result_;
};

std::string adviceFor(const HangEvidence& evidence, const Verdict& verdict) {
  if (verdict.state == VerdictState::kHealthy) {
    return "nothing";
  }
  const std::string& what = verdict.what;
  if (verdict.confidence == Confidence::kUndecidable) {
    return what == "all_in" ? "check the nodes and the network between the ranks of this group"
           : verdict.candidates.empty() && !evidence.silent_nodes.empty()
               ? "look after " + words::nodeList(evidence.silent_nodes) +
                     ": no rank there that runs, or its agent hangs"
           : verdict.candidates.empty()
               ? std::string(evidence.nodes > 1 ? "look at the reports of the other nodes, and "
                                                : "look ") +
                     "at the stacks: reft stack"
               : "compare the code at the places named above: reft stack --rank N";
  }
  if (what == "dead" && std::any_of(evidence.ranks.begin(), evidence.ranks.end(),
                                    [](const RankEvidence& rank) { return rank.oom_kills > 0; }))
    return "give the ranks of that node more host memory, or let them need less: dmesg says who "
           "was ended";
  if (what == "straggler")
    return "see what it does meanwhile, a few times: reft stack --rank " +
           std::to_string(verdict.culprits.empty() ? 0 : verdict.culprits.front().rank);
  if (what == "dead")
    return "read that rank's last lines in the launcher's log; dmesg tells of the OOM killer";
  if (what == "stopped")
    return "kill -CONT " +
           std::to_string(verdict.culprits.empty() ? 0 : verdict.culprits.front().pid) +
           (evidence.nodes > 1 && !verdict.culprits.empty()
                ? ", on " + verdict.culprits.front().host
                : "");
  if (what == "data_loading")
    return "look at that rank's data workers and at its storage";
  if (verdict.pattern == "P2" || verdict.pattern == "P6")
    return "compare the code at the places named above";
  return "see all stacks of that rank: reft stack --rank " +
         std::to_string(verdict.culprits.empty() ? 0 : verdict.culprits.front().rank);
}

}  // namespace

Verdict decide(const HangEvidence& evidence) {
  Verdict verdict = Engine(evidence).run();
  verdict.advice = adviceFor(evidence, verdict);
  return verdict;
}

bool atWork(const RankEvidence& rank, const Culprit& culprit) {
  if (outOfAction(rank)) {
    return false;
  }
  const bool child = std::any_of(
      rank.children.begin(), rank.children.end(),
      [](const ChildProcess& process) { return process.state == "R" || process.state == "D"; });
  // Who wants a processor and gets little of it shows by its state only.
  return child || rank.proc_state == "R" || culprit.reason == "busy" ||
         culprit.reason == "compiling" || culprit.reason == "profiling" || rank.cpu_share < 0 ||
         rank.cpu_share >= kBusyShare || rank.io_bytes >= kMovingIoBytes;
}

bool atDebuggerPrompt(const RankEvidence& rank) {
  const Stacks& stacks = rank.stacks.parsed();
  for (const ThreadStack& thread : stacks.threads) {
    for (size_t i = 0; thread.main && i < thread.frames.size(); ++i) {
      if (contains(thread.frames[i].file + ":" + thread.frames[i].function, kPrompts)) {
        return true;
      }
    }
  }
  return false;
}

const char* stateName(VerdictState state) {
  return state == VerdictState::kHang ? "hang" : state == VerdictState::kSlow ? "slow" : "healthy";
}

const char* confidenceName(Confidence confidence) {
  return confidence == Confidence::kCertain  ? "certain"
         : confidence == Confidence::kLikely ? "likely"
                                             : "undecidable";
}

}  // namespace reft
