#include "hang_detect/verdict/verdict.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"
#include "hang_detect/verdict/habit.h"
#include "hang_detect/verdict/job_view.h"
#include "hang_detect/verdict/nccl_edges.h"
#include "hang_detect/verdict/op_history.h"
#include "hang_detect/verdict/verdict_words.h"
#include "hang_detect/verdict/wait_graph.h"
#include "intercept/base/log.h"

namespace reft {

namespace {

// Ranks whose ends were noticed within this time ended together: none of them caused the others'
// end.
constexpr int64_t kTogetherNs = 20'000'000;
constexpr double kAskedSec = 10;       // time without progress to report if none is configured
constexpr double kHardCapFactor = 10;  // after that many times the configured time nothing excuses

// The ranks that ended first, uncleanly and not because of a failed op. `doubt_ns`: error of the
// times against each other.
std::set<size_t> firstDead(const std::vector<RankEvidence>& ranks, int64_t doubt_ns) {
  std::set<size_t> dead;
  int64_t first = INT64_MAX;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (endedUncleanly(ranks[r]) && !aNewestOpFailed(ranks[r])) {
      dead.insert(r);
      first = std::min(first, ranks[r].gone_ns > 0 ? ranks[r].gone_ns : INT64_MAX);
    }
  }
  if (first != INT64_MAX) {
    std::erase_if(dead,
                  [&](size_t r) { return ranks[r].gone_ns - first > kTogetherNs + doubt_ns; });
  }
  return dead;
}

std::set<size_t> unionOf(const std::vector<std::vector<size_t>>& lists) {
  std::set<size_t> result;
  for (const auto& list : lists) {
    result.insert(list.begin(), list.end());
  }
  return result;
}

bool cannotCome(const Culprit& culprit) {
  return culprit.rule != nullptr && culprit.rule->excuse == Excuse::kNever;
}

class Decision {
 public:
  explicit Decision(const HangEvidence& evidence)
      : evidence_(evidence),
        ranks_(evidence.ranks),
        view_(evidence),
        graph_(view_),
        ends_(graph_.ends()) {}

  Verdict make();

 private:
  // One case of a verdict: false if the evidence is not of its kind.
  using Case = bool (Decision::*)();
  struct Row {
    const char* name;
    Case applies;
  };
  static const Row kCases[];

  void gather();
  void addDisagreements(bool waited_for);
  bool disagreement();
  bool endedTogether();
  bool dead();
  bool outOfActionAndDisagreement();
  bool straggler();
  bool justBegun();
  bool missing();
  bool stopped();
  bool cycle();
  bool mismatchedMessages();
  bool insideNccl();
  bool network();
  bool allBegun();
  bool outside();
  bool failedCollective();
  bool devicesBehind();
  bool noWait();

  void describeBehind(std::vector<Culprit>& missing);
  void excuseMissing(const std::vector<Culprit>& missing);
  bool excuses(const Culprit& culprit) const;
  bool diedIn(size_t rank, const Disagreement& found);
  std::string cycleClass(const std::set<size_t>& ranks) const;
  OpKind heldKind(size_t rank) const;
  std::optional<Departure> departureOf(const std::set<size_t>& ranks) const;
  bool familiarPlace() const;
  bool allDevicesAreIn() const;
  bool takeAnswer(const NcclAnswer& answer,
                  const std::map<int, std::pair<size_t, const NcclFinding*>>& members);
  VerdictState stateByTime() const { return still_ ? VerdictState::kHang : VerdictState::kSlow; }
  void addEvidence(std::string sentence) { result_.evidence.push_back(std::move(sentence)); }
  // Sets the verdict, and returns the list in which `ranks` now are.
  std::vector<Culprit>& finish(VerdictState state, std::string what, std::string pattern,
                               Confidence confidence, const std::set<size_t>& ranks);

  const HangEvidence& evidence_;
  const std::vector<RankEvidence>& ranks_;
  const JobView view_;
  const WaitGraph graph_;
  const WaitGraph::Ends ends_;
  bool still_ = false;  // no progress for long enough to be suspicious
  bool hard_ = false;   // for so long that nothing excuses it
  double hard_sec_ = 0;
  std::set<size_t> first_dead_;
  std::set<size_t> out_;  // dead and stopped ranks that hold up the job whatever the ops say
  const Disagreement* disagreement_ = nullptr;  // the first for which ranks wait
  mutable std::optional<bool> familiar_;        // it goes over the ops of all ranks
  Verdict result_;
};

// Ranks that disagree come first, as numbers of ops mean nothing after that; then ends of
// processes, then waits. The order is the precedence.
const Decision::Row Decision::kCases[] = {
    {"disagreement", &Decision::disagreement},
    {"ended together", &Decision::endedTogether},
    {"dead", &Decision::dead},
    {"out of action, and disagreement", &Decision::outOfActionAndDisagreement},
    {"straggler", &Decision::straggler},
    {"just begun", &Decision::justBegun},
    {"missing", &Decision::missing},
    {"stopped", &Decision::stopped},
    {"cycle", &Decision::cycle},
    {"mismatched messages", &Decision::mismatchedMessages},
    {"inside NCCL", &Decision::insideNccl},
    {"network", &Decision::network},
    {"all begun", &Decision::allBegun},
    {"outside", &Decision::outside},
    {"failed collective", &Decision::failedCollective},
    {"devices behind", &Decision::devicesBehind},
    {"no wait", &Decision::noWait},
};

Verdict Decision::make() {
  gather();
  for (const auto& [name, applies] : kCases) {
    if ((this->*applies)()) {
      logDebug("hang", "verdict ", stateName(result_.state), " ", result_.what, ", case: ", name,
               ", ", ranks_.size(), " ranks, still for ", result_.waited_sec, " s");
      break;
    }
  }
  for (const std::vector<Culprit>* list : {&result_.culprits, &result_.candidates}) {
    for (const Culprit& culprit : *list) {
      logDebug("hang", "rank ", culprit.rank, ": rule ",
               culprit.rule != nullptr ? culprit.rule->name : "none", ", reason ", culprit.reason);
    }
  }
  for (std::string& sentence : waitSentences(view_, graph_)) {
    addEvidence(std::move(sentence));
  }
  addDisagreements(/*waited_for=*/false);
  result_.advice = adviceFor(evidence_, result_);
  return std::move(result_);
}

// What every case needs, and the sentences that matter most: a screen cuts the last ones.
void Decision::gather() {
  result_.waited_sec = view_.stillSec();
  // A NaN is no configured time.
  still_ =
      result_.waited_sec >= (evidence_.suspect_sec > 0 ? evidence_.suspect_sec * 0.9 : kAskedSec);
  hard_sec_ = (evidence_.suspect_sec > 0 ? evidence_.suspect_sec : kAskedSec) * kHardCapFactor;
  hard_ = result_.waited_sec >= hard_sec_;
  result_.disagreements = findDisagreements(view_);
  const auto found = std::find_if(result_.disagreements.begin(), result_.disagreements.end(),
                                  [](const Disagreement& entry) { return entry.waited_for; });
  disagreement_ = found == result_.disagreements.end() ? nullptr : &*found;
  addDisagreements(/*waited_for=*/true);
  if (!evidence_.silent_nodes.empty()) {
    addEvidence(silentNodesSentence(evidence_.silent_nodes));
  }
  if (!evidence_.nodes_problem.empty()) {
    addEvidence("other nodes: " + printable(evidence_.nodes_problem, 200));
  }
  if (const Wait* wait = graph_.widestWait()) {
    if (const auto* collective = std::get_if<CollectiveWait>(wait)) {
      result_.group = collective->group->name;
      result_.op = opOf(*collective);
      result_.seq = collective->seq;
    } else if (const auto* message = std::get_if<MessageWait>(wait)) {
      result_.group = message->group->name;
      result_.op = opKindName(message->op->kind);
      result_.seq = message->op->seq;
    }
  }
  first_dead_ = firstDead(ranks_, std::max<int64_t>(0, evidence_.clock_error_ns));
  // A rank that died in the very op of a disagreement died of it: a transport ends a process that
  // gets more bytes than it expects.
  for (const size_t rank : first_dead_) {
    if (disagreement_ == nullptr || !diedIn(rank, *disagreement_)) {
      out_.insert(rank);
    }
  }
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (isStopped(ranks_[r]) && (ends_.sinks.contains(r) || graph_.waitingRanks().empty())) {
      out_.insert(r);
    }
  }
}

void Decision::addDisagreements(bool waited_for) {
  for (const Disagreement& found : result_.disagreements) {
    if (found.waited_for == waited_for) {
      addEvidence("ranks disagree about " + found.text);
    }
  }
}

bool Decision::disagreement() {
  if (disagreement_ == nullptr || !out_.empty()) {
    return false;
  }
  const Disagreement& found = *disagreement_;
  const bool named = !found.minority.empty();
  const bool crashed = std::any_of(ranks_.begin(), ranks_.end(),
                                   [](const RankEvidence& rank) { return !rank.alive; });
  std::vector<Culprit>& list = finish(crashed ? VerdictState::kHang : stateByTime(), found.what,
                                      "P2", named ? Confidence::kLikely : Confidence::kUndecidable,
                                      view_.indicesOf(found.suspects()));
  result_.group = found.group;
  result_.seq = found.seq;
  auto calls = whatEachCalls(view_, view_.groups()[found.log], found.seq);
  for (Culprit& culprit : list) {
    culprit.reason = found.what;
    culprit.text = "rank " + std::to_string(culprit.rank) +
                   (named ? " differs from the others in " : " is one side of ") + "seq " +
                   std::to_string(found.seq) + " of group " + found.group + calls[culprit.rank];
  }
  return true;
}

bool Decision::endedTogether() {
  if (ranks_.empty() || first_dead_.size() != ranks_.size()) {
    return false;
  }
  finish(VerdictState::kHealthy, "ended", "P4", Confidence::kUndecidable, {});
  addEvidence("all ranks ended together, without a clean end");
  return true;
}

bool Decision::dead() {
  if (first_dead_.empty() || disagreement_ != nullptr) {
    return false;
  }
  std::set<size_t> named(out_);
  for (const size_t sink : ends_.sinks) {
    // A live sink may be on its way to the op that fails.
    if (ranks_[sink].said_bye && isOutOfAction(ranks_[sink])) {
      named.insert(sink);
    }
  }
  // A rank of a node that does not answer may have ended before them; and clocks of nodes may
  // differ by more than the ends do.
  const bool open = !evidence_.silent_nodes.empty() ||
                    first_dead_.size() > firstDead(ranks_, /*doubt_ns=*/0).size();
  finish(VerdictState::kHang, named.size() > first_dead_.size() ? "gone_and_stopped" : "dead", "P4",
         open            ? Confidence::kUndecidable
         : ends_.outside ? Confidence::kLikely
                         : Confidence::kCertain,
         named);
  return true;
}

bool Decision::outOfActionAndDisagreement() {
  if (out_.empty() || disagreement_ == nullptr) {
    return false;
  }
  std::set<size_t> candidates(out_);
  candidates.merge(view_.indicesOf(disagreement_->suspects()));
  finish(VerdictState::kHang, disagreement_->what, "P2", Confidence::kUndecidable, candidates);
  return true;
}

bool Decision::straggler() {
  const auto found =
      still_ || !out_.empty() ? std::nullopt : findStraggler(view_, result_.waited_sec);
  if (!found) {
    return false;
  }
  Culprit& culprit =
      finish(VerdictState::kSlow, "straggler", "P0", Confidence::kLikely, {found->rank}).front();
  culprit.reason = "straggler";
  culprit.text = "the others wait for rank " + std::to_string(culprit.rank) + " " +
                 std::to_string(std::lround(100 * found->share_of_time)) +
                 " % of the time: it was last in " + std::to_string(found->times_last) + " of " +
                 std::to_string(found->collectives) + " collectives, by " +
                 words::seconds(found->usual_wait_sec) + " on average";
  addEvidence("the job goes on");
  return true;
}

bool Decision::justBegun() {
  if (still_ || !out_.empty() || !allWaitsAreRecent(view_)) {
    return false;
  }
  finish(VerdictState::kHealthy, "progressing", "P0", Confidence::kUndecidable, {});
  addEvidence("every rank that waits in an op has only just begun it");
  return true;
}

bool Decision::missing() {
  if (ends_.sinks.empty()) {
    return false;
  }
  std::set<size_t> named(ends_.sinks);
  named.merge(unionOf(ends_.cycles));
  const bool all_out = std::all_of(ends_.sinks.begin(), ends_.sinks.end(),
                                   [this](size_t sink) { return isOutOfAction(ranks_[sink]); });
  const bool undecidable = ((ends_.outside || ends_.stuck) && !all_out) || !ends_.cycles.empty();
  std::vector<Culprit>& missing = finish(stateByTime(), "missing", "P1",
                                         undecidable     ? Confidence::kUndecidable
                                         : ends_.outside ? Confidence::kLikely
                                                         : Confidence::kCertain,
                                         named);
  describeBehind(missing);
  excuseMissing(missing);
  return true;
}

// Ranks whose hosts have begun the op, and whose devices keep the others waiting.
void Decision::describeBehind(std::vector<Culprit>& missing) {
  for (Culprit& culprit : missing) {
    for (const size_t rank : view_.indicesOf({culprit.rank})) {
      const auto found = graph_.behind().find(rank);
      if (found == graph_.behind().end() || isOutOfAction(ranks_[rank])) {
        continue;
      }
      culprit.rule = &deviceBehindRule();
      culprit.reason = culprit.rule->reason;
      culprit.text = behindText(view_, culprit.rank, *found->second);
      if (const std::string launched = ranks_[rank].driver.launchSentence(); !launched.empty()) {
        addEvidence("rank " + std::to_string(culprit.rank) + ": " + launched);
      }
    }
  }
}

// The others wait for all of the missing ranks: one that is at work explains it, unless another one
// cannot come at all.
void Decision::excuseMissing(const std::vector<Culprit>& missing) {
  result_.could_come = std::none_of(missing.begin(), missing.end(), cannotCome);
  result_.at_work = result_.could_come &&
                    std::any_of(missing.begin(), missing.end(),
                                [this](const Culprit& culprit) { return excuses(culprit); });
  if (std::all_of(missing.begin(), missing.end(), [&](const Culprit& culprit) {
        return culprit.reason == missing.front().reason;
      })) {
    result_.what = missing.front().reason;
  }
  if (result_.at_work && !hard_ && result_.state == VerdictState::kHang) {
    result_.state = VerdictState::kSlow;
    result_.pattern = "P0";
    addEvidence("a missing rank seems to be at work: slow, and called hung only after " +
                words::seconds(hard_sec_));
  }
}

bool Decision::excuses(const Culprit& culprit) const {
  const auto rank = std::find_if(ranks_.begin(), ranks_.end(), [&](const RankEvidence& entry) {
    return entry.rank == culprit.rank;
  });
  const bool works = usesProcessor(*rank) || childrenUseProcessor(*rank);
  switch (culprit.rule->excuse) {
    case Excuse::kNever: return false;
    case Excuse::kAlways: return true;
    case Excuse::kNewPlaceOrIo: return works || movesData(*rank) || !familiarPlace();
    case Excuse::kNewPlace: return works || !familiarPlace();
    case Excuse::kNewPlaceOnly: return !familiarPlace();
  }
  return false;
}

bool Decision::familiarPlace() const {
  if (!familiar_) {
    familiar_ = waitsAtAFamiliarPlace(view_, graph_.waitingRanks(), result_.waited_sec);
  }
  return *familiar_;
}

bool Decision::stopped() {
  if (out_.empty()) {
    return false;
  }
  finish(VerdictState::kSlow, "stopped", "P1", Confidence::kLikely, out_);
  return true;
}

bool Decision::cycle() {
  if (ends_.cycles.empty()) {
    return false;
  }
  const std::set<size_t> ranks = unionOf(ends_.cycles);
  const std::string what = cycleClass(ranks);
  std::set<size_t> odd =
      ends_.outside || what != "cycle" ? std::set<size_t>{} : ranksOutOfOrder(view_, ranks);
  const auto departure = odd.empty() ? departureOf(ranks) : std::nullopt;
  if (departure) {
    odd = {departure->rank};
  }
  std::vector<Culprit>& list = finish(stateByTime(), what, what == "p2p_mismatch" ? "P2" : "P6",
                                      odd.empty() ? Confidence::kUndecidable : Confidence::kLikely,
                                      odd.empty() ? ranks : odd);
  addEvidence(words::rankList(view_.numbersOf({ranks.begin(), ranks.end()})) +
              " wait for each other in a cycle");
  for (Culprit& culprit : list) {
    culprit.reason = what;
    culprit.text = "rank " + std::to_string(culprit.rank) +
                   (departure     ? departureText(view_, *departure)
                    : odd.empty() ? " is part of the cycle" + whereInOp(view_, culprit.rank)
                                  : " has another order of ops than the others" +
                                        whereInOp(view_, culprit.rank));
  }
  return true;
}

// The last resort: where nothing else tells ranks apart that wait for each other.
std::optional<Departure> Decision::departureOf(const std::set<size_t>& ranks) const {
  return ends_.outside ? std::nullopt : oddByHabit(view_, ranks);
}

std::string Decision::cycleClass(const std::set<size_t>& ranks) const {
  if (!graph_.mismatches().empty()) {
    return "p2p_mismatch";
  }
  const auto allIn = [&](OpKind kind) {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](size_t rank) { return heldKind(rank) == kind; });
  };
  if (allIn(OpKind::kSend)) {
    return "crossed_sends";
  }
  if (allIn(OpKind::kRecv)) {
    return "crossed_recvs";
  }
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](size_t rank) { return isPointToPoint(heldKind(rank)); })
             ? "p2p_count_mismatch"
             : "cycle";
}

OpKind Decision::heldKind(size_t rank) const {
  const OpEntry* op = view_.newestHeld(rank);
  return op == nullptr ? OpKind::kUnknown : op->kind;
}

bool Decision::mismatchedMessages() {
  if (graph_.mismatches().empty()) {
    return false;
  }
  std::set<size_t> pairs;
  for (const auto& [a, b] : graph_.mismatches()) {
    pairs.insert({a, b});
  }
  const auto departure = departureOf(pairs);
  std::vector<Culprit>& list = finish(stateByTime(), "p2p_mismatch", "P2",
                                      departure ? Confidence::kLikely : Confidence::kUndecidable,
                                      departure ? std::set<size_t>{departure->rank} : pairs);
  if (departure) {
    list.front().reason = "p2p_mismatch";
    list.front().text =
        "rank " + std::to_string(list.front().rank) + departureText(view_, *departure);
  }
  return true;
}

// Every party to an op has begun it, and NCCL's own progress shows what it waits for. The
// communicators of a job share ranks; the first one whose members wait and whose answer is one
// counts.
bool Decision::insideNccl() {
  if (!ends_.stuck) {
    return false;
  }
  std::map<uint64_t, std::map<int, std::pair<size_t, const NcclFinding*>>> comms;
  for (const size_t rank : graph_.waitingRanks()) {
    for (const NcclFinding& finding : ranks_[rank].nccl) {
      comms[finding.comm].emplace(finding.rank, std::pair{rank, &finding});
    }
  }
  for (const auto& [comm, members] : comms) {
    std::vector<NcclFinding> findings;
    for (const auto& [number, member] : members) {
      findings.push_back(*member.second);
    }
    if (takeAnswer(joinNccl(findings), members)) {
      return true;
    }
  }
  return false;
}

// False if the answer decides nothing.
bool Decision::takeAnswer(const NcclAnswer& answer,
                          const std::map<int, std::pair<size_t, const NcclFinding*>>& members) {
  const auto rankOf = [&](int number) { return members.at(number).first; };
  const auto isKnown = [&](int number) { return members.contains(number); };
  switch (answer.kind) {
    case NcclAnswer::Kind::kNothing:
    case NcclAnswer::Kind::kUndecidable: return false;
    case NcclAnswer::Kind::kAdvancing:
      finish(VerdictState::kSlow, "all_in", "P0", Confidence::kUndecidable, {});
      result_.at_work = true;
      addEvidence("NCCL still moves data: slow, not hung");
      return true;
    case NcclAnswer::Kind::kNetwork:
      for (const NcclAnswer::Link& link : answer.links) {
        if (isKnown(link.from) && isKnown(link.to)) {
          result_.dead_paths.push_back({rankOf(link.from), rankOf(link.to), link.both, 0, 0});
        }
      }
      if (result_.dead_paths.empty()) {
        return false;
      }
      finish(stateByTime(), "network", "P3", Confidence::kLikely, {});
      for (std::string& sentence : deadPathSentences(view_, result_.dead_paths)) {
        addEvidence("NCCL: " + sentence);
      }
      return true;
    case NcclAnswer::Kind::kGpu:
    case NcclAnswer::Kind::kProxy: {
      if (!isKnown(answer.rank)) {
        return false;
      }
      const bool gpu = answer.kind == NcclAnswer::Kind::kGpu;
      Culprit& culprit = finish(stateByTime(), gpu ? "gpu_stands" : "proxy_stands", "P3",
                                Confidence::kLikely, {rankOf(answer.rank)})
                             .front();
      culprit.reason = result_.what;
      culprit.text = "rank " + std::to_string(culprit.rank) +
                     (gpu ? ": NCCL waits for its GPU, which waits for no other rank"
                          : ": the proxy thread of NCCL does not run");
      return true;
    }
  }
  return false;
}

// Every party to an op has begun it, and connections between some of them are dead.
bool Decision::network() {
  result_.dead_paths =
      ends_.stuck ? deadPaths(view_, graph_.waitingRanks()) : std::vector<DeadPath>{};
  if (result_.dead_paths.empty()) {
    return false;
  }
  finish(stateByTime(), "network", "P3", Confidence::kLikely, {});
  for (std::string& sentence : deadPathSentences(view_, result_.dead_paths)) {
    addEvidence(std::move(sentence));
  }
  return true;
}

bool Decision::allBegun() {
  if (!ends_.stuck) {
    return false;
  }
  // The first op of a group makes its communicator, and a huge tensor takes its time.
  const bool excused = still_ && !hard_ && !familiarPlace();
  finish(excused ? VerdictState::kSlow : stateByTime(), "all_in", "P3", Confidence::kUndecidable,
         {});
  const std::string in = allDevicesAreIn() ? "the devices of all members are in the op"
                                           : "every member has begun the op";
  addEvidence(in + (excused ? ", at a place where none has waited before: slow, not hung"
                            : " and it does not end: a network or a device may be at fault"));
  return true;
}

bool Decision::allDevicesAreIn() const {
  return std::all_of(graph_.waits().begin(), graph_.waits().end(), [](const Wait& wait) {
    const auto* collective = std::get_if<CollectiveWait>(&wait);
    return collective != nullptr && collective->all_begun &&
           std::all_of(collective->group->members.begin(), collective->group->members.end(),
                       [&](const Member& member) {
                         const OpEntry* op = member.find(collective->seq);
                         return op != nullptr && op->reached;
                       });
  });
}

bool Decision::outside() {
  if (!ends_.outside) {
    return false;
  }
  finish(stateByTime(), "elsewhere", "P1", Confidence::kUndecidable, {});
  addEvidence(evidence_.silent_nodes.empty() ? "ranks here wait for ranks that this node cannot see"
                                             : "ranks wait for ranks without any evidence");
  return true;
}

bool Decision::failedCollective() {
  if (std::none_of(ranks_.begin(), ranks_.end(), endedUncleanly)) {
    return false;
  }
  finish(VerdictState::kHang, "collective_failed", "P4", Confidence::kUndecidable, {});
  addEvidence("ranks ended because an op failed, and none ended before them");
  return true;
}

// No device has reached an op that its host has begun: each of them works, or waits for something
// that is no op.
bool Decision::devicesBehind() {
  std::set<size_t> behind;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (std::any_of(ranks_[r].tail.begin(), ranks_[r].tail.end(), isAheadOfDevice)) {
      behind.insert(r);
    }
  }
  if (!still_ || behind.empty()) {
    return false;
  }
  finish(hard_ ? VerdictState::kHang : VerdictState::kSlow, "device_behind", "P5",
         Confidence::kUndecidable, behind);
  result_.at_work = !hard_;
  addEvidence("no device has reached the ops that its host has begun since");
  return true;
}

bool Decision::noWait() {
  finish(VerdictState::kHealthy, still_ ? "outside" : "progressing", still_ ? "P7" : "P0",
         Confidence::kUndecidable, {});
  addEvidence("no rank waits in an op");
  return true;
}

bool Decision::diedIn(size_t rank, const Disagreement& found) {
  for (const GroupLog& group : view_.groups()) {
    for (const Member& member : group.members) {
      const OpEntry* op =
          group.name == found.group && member.rank == rank ? member.find(found.seq) : nullptr;
      if (op != nullptr && op->done_ns == 0) {
        addEvidence("rank " + std::to_string(ranks_[rank].rank) + " ended in seq " +
                    std::to_string(found.seq) + " of group " + found.group);
        return true;
      }
    }
  }
  return false;
}

std::vector<Culprit>& Decision::finish(VerdictState state, std::string what, std::string pattern,
                                       Confidence confidence, const std::set<size_t>& ranks) {
  result_.state = state;
  result_.what = std::move(what);
  result_.pattern = std::move(pattern);
  result_.confidence = confidence;
  std::vector<Culprit>& list =
      confidence == Confidence::kUndecidable ? result_.candidates : result_.culprits;
  for (const size_t rank : ranks) {
    list.push_back(describeRank(ranks_[rank]));
  }
  std::sort(list.begin(), list.end(),
            [](const Culprit& a, const Culprit& b) { return a.rank < b.rank; });
  std::set<int> victims;
  for (const size_t rank : graph_.waitingRanks()) {
    if (!ranks.contains(rank)) {
      victims.insert(ranks_[rank].rank);
    }
  }
  result_.victims.assign(victims.begin(), victims.end());
  return list;
}

}  // namespace

Verdict decide(const HangEvidence& evidence) {
  Verdict verdict = Decision(evidence).make();
  std::ranges::move(hardwareSentences(evidence), std::back_inserter(verdict.evidence));
  return verdict;
}

const char* stateName(VerdictState state) {
  switch (state) {
    case VerdictState::kHealthy: return "healthy";
    case VerdictState::kSlow: return "slow";
    case VerdictState::kHang: return "hang";
    case VerdictState::kCrash: return "crash";
  }
  return "healthy";
}

const char* confidenceName(Confidence confidence) {
  return confidence == Confidence::kCertain  ? "certain"
         : confidence == Confidence::kLikely ? "likely"
                                             : "undecidable";
}

const char* remedyName(Remedy remedy) {
  switch (remedy) {
    case Remedy::kNone: return "none";
    case Remedy::kRetry: return "retry";
    case Remedy::kExcludeNode: return "exclude node";
    case Remedy::kFixProgram: return "fix the program";
  }
  return "none";
}

}  // namespace reft
