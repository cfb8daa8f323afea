#include "agent/hang/investigation.h"

#include <algorithm>

#include "hang_detect/evidence/oom_kills.h"
#include "hang_detect/rank/verdict_notice.h"
#include "hang_detect/report/wrap.h"
#include "hang_detect/verdict/crash.h"
#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft::agent {

namespace {

// Time that ranks have to answer for their stacks.
constexpr int64_t kStackWaitNs = 2 * kSecond;
// A launcher ends or restarts the other ranks within this time after a death; then there is nothing
// to report.
constexpr int64_t kDeathNs = 2 * kSecond;
// torchrun checks its processes every 100 ms.
constexpr int64_t kAfterCrashNs = kSecond / 5;
// After the first death, if not all ranks have ended by then.
constexpr int64_t kEndsNs = 3 * kSecond / 2;
// Time to read the hardware counters after it: whether a GPU is lost. The launcher, on whose
// terminal the verdict is to be, may end at once.
constexpr int64_t kCountersNs = kSecond / 2;
constexpr size_t kMaxChildStacks = 32;   // processes of a rank whose stacks are read
constexpr size_t kMaxDisagreements = 8;  // reported in an incarnation; later ones are counted
constexpr int kMoreLooksForSilent = 3;   // after a report without some nodes
constexpr size_t kMaxNodeRequests = 16;  // at a time

int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>(seconds * 1e9);
}

}  // namespace

Investigation::Investigation(const Settings& settings)
    : settings_(settings),
      hang_watch_(nanoseconds(settings.suspect_sec), settings.tick_ns),
      leader_(settings.node, nanoseconds(settings.suspect_sec)),
      abort_policy_(settings.abort_on_hang, nanoseconds(settings.suspect_sec)) {}

void Investigation::setNode(int node) {
  settings_.node = node;
  leader_.setNode(node);
}

// ---- time

void Investigation::tick(const std::vector<RankLog>& logs, bool traced, int64_t now_ns) {
  std::map<int, Progress> live;
  for (const auto& entry : logs) {
    live[entry.rank] = progressOf(*entry.log);
  }
  compareOps(logs, now_ns);
  hang_watch_.look(now_ns);
  // The answers to an earlier look may still be on their way.
  if (!looking() && hang_watch_.suspect(live, now_ns) && leader_.suspect(facts_.nodes, now_ns)) {
    logInfo("agent", "no rank made progress for ", settings_.suspect_sec, " s: collecting stacks");
    start(Look::Kind::kSuspected, {}, now_ns);
  }
  watchOtherNodes(now_ns);
  if (hang_watch_.halfway(now_ns)) {
    add(action::Count{});
    // Some seconds later, a driver that does not answer is known as such.
    add(action::ReadHardware{});
  }
  if (hang_watch_.early(now_ns)) {
    start(Look::Kind::kEarly, {}, now_ns);
  }
  checkAbort(traced, now_ns);
  if (death_due_ns_ != 0 && now_ns >= death_due_ns_) {
    death_due_ns_ = 0;
    if (facts_.anyLive()) {  // else the launcher has ended the job, and reports why
      start(Look::Kind::kSuspected, {}, now_ns);
    }
  }
}

void Investigation::advance(int64_t now_ns) {
  hang_watch_.look(now_ns);  // an answer may come before the first tick after an absence
  std::erase_if(looks_, [this](const Look& look) { return discarded(look); });
  settleEnds(now_ns);
  for (auto& look : looks_) {
    for (const int rank : look.overdue(facts_, now_ns)) {
      // It may hang in C, or its process may have no time.
      if (auto pids = look.toRead({facts_.ranks.at(rank).pid}); !pids.empty()) {
        add(action::ReadOutside{look.id(), std::move(pids)});
      }
    }
    if (look.ready(facts_, now_ns)) {
      add(action::Examine{look.id(), look.ranks()});
    }
  }
}

// Ranks that were started again make a look at their predecessors worthless.
bool Investigation::discarded(const Look& look) const {
  const bool old = look.kind() != Look::Kind::kTool && look.incarnation() != facts_.incarnation;
  if (old) {
    logDebug("agent", "look ", look.id(), " discarded: the ranks were started again");
  }
  return old;
}

// Reports ops that ranks of this node disagree about: without a hang they give wrong values.
void Investigation::compareOps(const std::vector<RankLog>& logs, int64_t now_ns) {
  if (compared_incarnation_ != facts_.incarnation) {
    compared_incarnation_ = facts_.incarnation;
    agreement_watch_.reset();
    disagreements_.clear();
  }
  for (const auto& entry : logs) {
    if (entry.newest) {
      agreement_watch_.read(entry.rank, *entry.log, now_ns);
    }
  }
  while (const auto found = agreement_watch_.next(now_ns)) {
    // The report on ranks that died of it gives more.
    if (found->text.empty() || disagreements_.size() >= kMaxDisagreements ||
        crash_incarnation_ == compared_incarnation_) {
      continue;
    }
    const auto text = "ranks disagree about an op: " + found->text;
    logWarn("agent", text);
    disagreements_.push_back(*found);
    if (const auto speaker = speakerOf(nullptr)) {
      add(action::Show{
          speaker, wrapText("reft: job " + settings_.job + ": " + text, 2) +
                       "\nreft: may not hang, but results are wrong (reported once per group)\n"});
    }
  }
}

void Investigation::watchOtherNodes(int64_t now_ns) {
  if (facts_.nodes <= 1) {
    return;
  }
  if (hang_watch_.episode() != leader_episode_) {
    leader_episode_ = hang_watch_.episode();
    leader_.progress();
  }
  switch (leader_.tick(now_ns)) {
    case Leader::Act::kNothing: break;
    case Leader::Act::kAskFirst: add(action::AskNodes{0, 0, NodeRequest::kPlease}); break;
    case Leader::Act::kLead:
      logInfo("agent",
              "no rank made progress, and no node before this one investigates: collecting stacks");
      if (!looking()) {
        start(Look::Kind::kSuspected, {}, now_ns);
      }
      break;
  }
  // Without announcements the other nodes would investigate, too.
  if (hang_watch_.reportedStillNs(now_ns) > 0 && now_ns >= announce_due_ns_) {
    announce_due_ns_ = now_ns + leader_.announceNs();
    add(action::AskNodes{0, 0, NodeRequest::kHold});
  }
}

bool Investigation::wantsTracers(int64_t now_ns) const {
  return settings_.abort_on_hang && hang_watch_.reportedStillNs(now_ns) > 0;
}

void Investigation::checkAbort(bool traced, int64_t now_ns) {
  const auto still_ns = hang_watch_.reportedStillNs(now_ns);
  switch (abort_policy_.tick(now_ns, still_ns, facts_.incarnation, traced)) {
    case AbortPolicy::Act::kNothing: break;
    case AbortPolicy::Act::kLookAgain: start(Look::Kind::kConfirm, {}, now_ns); break;
    case AbortPolicy::Act::kAbort:
      aborted_incarnation_ = abort_policy_.incarnation();
      add(action::Abort{abort_policy_.incarnation(), speaker_, abort_policy_.why()});
      break;
  }
}

// ---- events

void Investigation::ended(int rank, bool oom, RankEvidence how, int64_t now_ns) {
  ended_ns_[rank] = now_ns;
  const auto known = facts_.ranks.find(rank);
  if (known == facts_.ranks.end()) {
    return;
  }
  const auto& facts = known->second;
  how.gone_ns = now_ns;
  noteEnd(facts, std::move(how), now_ns);
  if (facts.said_bye) {
    return;
  }
  if (death_due_ns_ == 0 && facts.incarnation != aborted_incarnation_ &&
      facts.incarnation != crash_incarnation_) {
    death_due_ns_ = now_ns + kDeathNs;
    // At once: the ranks that replace these begin new op logs.
    start(Look::Kind::kCrash, {}, now_ns);
  }
  if (oom) {
    last_words_ =
        wrapText("reft: rank " + std::to_string(rank) + " pid " + std::to_string(facts.pid) +
                     " is gone; " + kOomKillText +
                     ": give the ranks of this node more host memory, or reduce what they need",
                 2) +
        "\n";
    last_words_incarnation_ = facts.incarnation;
  }
}

void Investigation::noteEnd(const RankFacts& facts, RankEvidence how, int64_t now_ns) {
  if (facts.incarnation != ends_incarnation_) {
    concludeEnds(now_ns);
    ends_.clear();
    ends_incarnation_ = facts.incarnation;
  }
  const bool first =
      !facts.said_bye && std::none_of(ends_.begin(), ends_.end(),
                                      [](const auto& end) { return !end.second.said_bye; });
  if (first) {
    first_end_ns_ = now_ns;
    ends_due_ns_ = now_ns + kEndsNs;
  }
  ends_[facts.rank] = std::move(how);
}

// Reports the ends if it is time: no rank lives, or some have ended long ago. Not before the ranks
// were searched for a disagreement, which would explain them.
void Investigation::settleEnds(int64_t now_ns) {
  const bool any_lives =
      std::any_of(facts_.ranks.begin(), facts_.ranks.end(), [this](const auto& entry) {
        return entry.second.live() && entry.second.incarnation == ends_incarnation_;
      });
  const bool counts = facts_.gpus && facts_.sampling && now_ns < first_end_ns_ + kCountersNs;
  if (ends_due_ns_ == 0 || counts || (any_lives && now_ns < ends_due_ns_)) {
    return;
  }
  bool open = false;
  for (Look& look : looks_) {
    if (look.kind() == Look::Kind::kCrash && look.incarnation() == ends_incarnation_) {
      look.hurry(now_ns);
      open = true;
    }
  }
  if (!open) {
    concludeEnds(now_ns);
  }
}

// Reports which rank failed first, once an attempt, unless a hang or a disagreement has been
// reported that explains the ends.
void Investigation::concludeEnds(int64_t now_ns) {
  if (ends_due_ns_ == 0) {
    return;
  }
  ends_due_ns_ = 0;
  if (ends_incarnation_ == crash_incarnation_ || ends_incarnation_ == aborted_incarnation_) {
    return;
  }
  HangEvidence evidence = evidenceAt(now_ns);
  for (const auto& [number, rank] : facts_.ranks) {
    if (rank.live() && rank.incarnation == ends_incarnation_) {
      RankEvidence& lives = evidence.ranks.emplace_back();
      lives.rank = number;
      lives.node = settings_.node;
      lives.pid = rank.pid;
      lives.alive = true;
    }
  }
  for (const auto& [number, rank] : ends_) {
    evidence.ranks.push_back(rank);
  }
  std::sort(evidence.ranks.begin(), evidence.ranks.end(),
            [](const RankEvidence& a, const RankEvidence& b) { return a.rank < b.rank; });
  Verdict verdict = decideCrash(evidence);
  if (verdict.state != VerdictState::kCrash) {
    return;
  }
  const int alike = noteRepetition(evidence, verdict);
  const int limit = settings_.crash_loop_limit;
  const int loop = limit > 0 && alike >= limit && facts_.restarts ? alike : 0;
  ++crash_reports_;
  const bool quiet = verdict.outside;
  add(action::WriteReport{ends_incarnation_, speakerOf(nullptr), true, true, quiet, loop,
                          findingOf(evidence, verdict), std::move(evidence)});
}

// The same failure at the same step as in the attempt before: a restart does not help. How often in
// a row it came; 0: no rank is named.
int Investigation::noteRepetition(const HangEvidence& evidence, Verdict& verdict) {
  std::string failure;
  for (const Culprit& culprit : verdict.culprits) {
    failure += std::to_string(culprit.rank) + " " + culprit.reason;
    const auto rank =
        std::find_if(evidence.ranks.begin(), evidence.ranks.end(),
                     [&](const RankEvidence& entry) { return entry.rank == culprit.rank; });
    if (rank != evidence.ranks.end() && rank->ending.exception) {
      failure += " " + rank->ending.exception->type;
    }
    if (culprit.frame) {
      failure += " " + culprit.frame->file + ":" + std::to_string(culprit.frame->line);
    }
    failure += ", ";
  }
  if (failure.empty() || verdict.outside) {
    failure_.clear();
    return 0;
  }
  failure += std::to_string(verdict.step);
  same_failures_ = failure == failure_ ? same_failures_ + 1 : 1;
  failure_ = std::move(failure);
  if (same_failures_ > 1) {
    verdict.evidence.insert(verdict.evidence.begin(),
                            "the same failure at the same step for the " +
                                std::to_string(same_failures_) +
                                ". time in a row: another start will not help");
  }
  return same_failures_;
}

void Investigation::voted(int rank) {
  const auto known = facts_.ranks.find(rank);
  if (last_words_.empty() || known == facts_.ranks.end() ||
      known->second.incarnation == last_words_incarnation_) {
    return;
  }
  add(action::Show{known->second.connection,
                   "reft: why the previous ranks ended:\n" + last_words_});
  last_words_.clear();
}

void Investigation::toolAsks(uint64_t connection, const std::vector<int>& ranks, int64_t now_ns) {
  if (looks_.size() >= kMaxLooks) {
    throw InvalidArgument("stacks_request", "the " + std::to_string(kMaxLooks) + "th at a time",
                          "fewer");
  }
  start(Look::Kind::kTool, {ranks.begin(), ranks.end()}, now_ns).requesters = {connection};
}

void Investigation::nodeAsks(uint64_t connection, const EvidenceRequest& request, int64_t now_ns) {
  if (request.node == settings_.node) {
    return;
  }
  if (request.kind != NodeRequest::kPlease) {
    leader_.ledBy(request.node, now_ns);
  }
  if (request.kind == NodeRequest::kPlease && settings_.node == 0 && !looking()) {
    if (hang_watch_.reportedStillNs(now_ns) > 0) {
      announce_due_ns_ = now_ns;
    } else {
      logInfo("agent", "the ranks of node ", request.node, " make no progress: collecting stacks");
      start(Look::Kind::kSuspected, {}, now_ns);
    }
  }
  if (request.kind != NodeRequest::kEvidence) {
    return;
  }
  size_t open = 0;
  for (auto& look : looks_) {
    open += look.kind() == Look::Kind::kNode ? 1 : 0;
    if (look.kind() == Look::Kind::kNode && look.request == request.id) {
      look.requesters.push_back(connection);  // another carrier of this node
      return;
    }
  }
  if (open < kMaxNodeRequests && looks_.size() < kMaxLooks) {
    Look& look = start(Look::Kind::kNode, {}, now_ns);
    look.requesters = {connection};
    look.request = request.id;
    look.asked_ns = now_ns;
  }
}

// ---- looks

Look& Investigation::start(Look::Kind kind, const std::set<int>& only, int64_t now_ns) {
  const int64_t wait_ns = kind == Look::Kind::kCrash ? 0
                          : kind == Look::Kind::kEarly
                              ? std::min(kStackWaitNs, hang_watch_.earlyWaitNs())
                              : kStackWaitNs;
  Look& look = looks_.emplace_back(kind, next_look_++, facts_, only, now_ns, wait_ns);
  logDebug("agent", "look ", look.id(), " of kind ", static_cast<int>(kind), " begins");
  if (look.withOtherNodes()) {
    look.nodes.expect(facts_.nodes, settings_.node);
  }
  if (kind != Look::Kind::kEarly) {
    add(action::ReadHardware{kind == Look::Kind::kCrash});
  }
  add(action::Sample{look.id(), look.ranks(), look.thorough()});
  if (look.withOtherNodes() && facts_.nodes > 1) {
    add(action::AskNodes{look.id(), static_cast<double>(kGatherNs) * 1e-9, NodeRequest::kEvidence});
  }
  return look;
}

Look* Investigation::find(uint64_t id) {
  const auto found = std::find_if(looks_.begin(), looks_.end(),
                                  [id](const Look& look) { return look.id() == id; });
  return found == looks_.end() ? nullptr : &*found;
}

bool Investigation::looking() const {
  return std::any_of(looks_.begin(), looks_.end(), [](const Look& look) {
    return look.own() && look.kind() != Look::Kind::kEarly;
  });
}

void Investigation::sampled(uint64_t id, const std::vector<ProcessSample>& samples,
                            int64_t now_ns) {
  Look* look = find(id);
  if (look == nullptr) {
    return;
  }
  action::AskForStacks ask{id, {}};
  std::vector<Action> reads;
  const auto read = [&](const std::vector<int>& pids) {
    if (auto fresh = look->toRead(pids); !fresh.empty()) {
      reads.emplace_back(action::ReadOutside{id, std::move(fresh)});
    }
  };
  for (const auto& sample : samples) {
    look->sampled(sample, now_ns);
    const auto rank = facts_.ranks.find(sample.rank);
    if (look->kind() == Look::Kind::kCrash || rank == facts_.ranks.end()) {
      continue;
    }
    const RankFacts& facts = rank->second;
    if (facts.connection != 0) {
      ask.connections.push_back(facts.connection);
    }
    if (facts.alive && !facts.hidden && (facts.connection == 0 || sample.stopped)) {
      read({facts.pid});  // it will not answer
    }
    if (facts.alive && look->thorough()) {
      auto children = sample.children;
      children.resize(std::min(children.size(), kMaxChildStacks));
      read(children);
    }
  }
  if (!ask.connections.empty()) {
    add(std::move(ask));
  }
  actions_.insert(actions_.end(), std::make_move_iterator(reads.begin()),
                  std::make_move_iterator(reads.end()));
}

void Investigation::counted(const std::map<int, ProcessCounters>& counters, int64_t now_ns) {
  uses_.clear();
  for (const auto& [rank, used] : counters) {
    uses_[rank] = {now_ns, used};
  }
}

void Investigation::replied(uint64_t id, int rank, std::string payload) {
  if (Look* look = find(id)) {
    look->replied(rank, std::move(payload));
  }
}

void Investigation::readOutside(uint64_t id, int pid, RemoteStacks stacks) {
  if (Look* look = find(id)) {
    look->read(pid, std::move(stacks));
  }
}

void Investigation::gathering(uint64_t id, uint64_t carrier, int64_t now_ns) {
  if (Look* look = find(id)) {
    look->nodes.asked(carrier, now_ns);
  }
}

void Investigation::gathered(uint64_t carrier, Gathered message, int64_t now_ns) {
  if (Look* look = find(message.id)) {
    look->nodes.gathered(carrier, std::move(message), now_ns);
  }
}

// ---- evidence and verdict

HangEvidence Investigation::evidenceAt(int64_t now_ns) const {
  HangEvidence evidence;
  evidence.job = settings_.job;
  evidence.node = settings_.node;
  evidence.world = facts_.world;
  evidence.nodes = facts_.nodes;
  evidence.now_ns = now_ns;
  addHardwareNotes(evidence, facts_.hardware, settings_.node);
  return evidence;
}

HangEvidence Investigation::evidenceOf(const Look& look, std::vector<RankEvidence> ranks,
                                       int64_t now_ns) const {
  HangEvidence evidence = evidenceAt(now_ns);
  evidence.suspect_sec =
      look.own() && look.kind() != Look::Kind::kCrash ? settings_.suspect_sec : 0;
  evidence.away_sec = static_cast<double>(hang_watch_.awayNs()) * 1e-9;
  for (auto& entry : ranks) {
    const auto known = facts_.ranks.find(entry.rank);
    if (known == facts_.ranks.end() || !look.hasRank(entry.rank)) {
      continue;
    }
    if (!known->second.alive) {
      const auto ended = ended_ns_.find(entry.rank);
      entry.gone_ns = ended == ended_ns_.end() ? 0 : ended->second;
    }
    // A tool may ask at any time.
    const bool comparable = look.kind() != Look::Kind::kTool || hang_watch_.noted();
    look.addTo(entry, known->second, comparable ? uses_ : std::map<int, Use>{});
    evidence.ranks.push_back(std::move(entry));
  }
  return evidence;
}

void Investigation::examined(uint64_t id, std::vector<RankEvidence> ranks, int64_t now_ns) {
  const auto look = std::find_if(looks_.begin(), looks_.end(),
                                 [id](const Look& entry) { return entry.id() == id; });
  if (look == looks_.end()) {
    return;
  }
  auto evidence = evidenceOf(*look, std::move(ranks), now_ns);
  if (look->thorough() && look->kind() != Look::Kind::kTool) {
    add(action::Count{});  // for the next look
  }
  switch (look->kind()) {
    case Look::Kind::kNode:
      add(action::AnswerNode{look->request, look->requesters, look->asked_ns, std::move(evidence),
                             facts_.nodes});
      break;
    case Look::Kind::kEarly: hang_watch_.lookedEarly(decide(evidence)); break;
    case Look::Kind::kTool:
      add(action::AnswerTool{look->requesters.at(0), judge(evidence).json});
      break;
    case Look::Kind::kCrash:
    case Look::Kind::kSuspected:
    case Look::Kind::kConfirm: {
      look->nodes.addTo(evidence, settings_.boot);
      auto finding = judge(evidence);
      // The other ranks may be about to begin the op, and the launcher has not ended them yet.
      if ((!finding.disagreement || finding.confidence == Confidence::kUndecidable) &&
          look->againAfter(kAfterCrashNs, now_ns)) {
        return;
      }
      conclude(*look, std::move(evidence), std::move(finding), now_ns);
      break;
    }
  }
  looks_.erase(look);
  settleEnds(now_ns);
}

void Investigation::conclude(const Look& look, HangEvidence evidence, Finding finding,
                             int64_t now_ns) {
  const bool crash = look.kind() == Look::Kind::kCrash;
  if (look.kind() == Look::Kind::kConfirm) {
    abort_policy_.lookedAgain(finding);
    logInfo("agent", "second look:\n", finding.screen);
  } else if (crash && !finding.disagreement) {
    logInfo("agent", "the ranks did not disagree about an op when one of them ended");
  } else if (!hang_watch_.credible(finding)) {
    logInfo("agent",
            finding.state == VerdictState::kHang ? "a hang if the next look finds it, too:\n"
                                                 : "no hang:\n",
            finding.screen);
    showSlow(look, finding);
  } else if (hang_watch_.reportedStillNs(now_ns) > 0 &&
             finding.confidence == Confidence::kUndecidable) {
    logInfo("agent", "looked again, still inconclusive:\n", finding.screen);
  } else {
    hang_watch_.reported(
        finding.silent && finding.confidence == Confidence::kUndecidable ? kMoreLooksForSilent : 0);
    if (crash) {
      death_due_ns_ = 0;
      crash_incarnation_ = look.incarnation();
    }
    ++hang_reports_;
    add(action::WriteReport{look.incarnation(), speakerOf(&look), crash, false, false, 0,
                            std::move(finding), std::move(evidence)});
  }
}

// Names the rank that keeps the others waiting while it is at work, once a wait: whether it hangs
// is known only much later. Not once an episode: if ranks of other nodes wait, the own ones go on.
void Investigation::showSlow(const Look& look, const Finding& finding) {
  if (finding.state != VerdictState::kSlow || !finding.excused ||
      finding.confidence == Confidence::kUndecidable) {
    return;
  }
  const std::string wait = std::to_string(look.incarnation()) + " " + finding.wait;
  if (wait == shown_slow_) {
    return;
  }
  shown_slow_ = wait;
  if (const auto speaker = speakerOf(&look)) {
    add(action::Show{speaker, finding.screen});
  }
}

void Investigation::written(const action::WriteReport& report, const std::string& path,
                            bool on_disk, int64_t now_ns) {
  std::string next;
  if (report.loop > 0) {
    next = "now: the launcher is ended, as REFT_CRASH_LOOP_LIMIT=" +
           std::to_string(settings_.crash_loop_limit) + " wants: " + std::to_string(report.loop) +
           " attempts in a row have failed alike";
  } else if (on_disk && !report.ends) {
    next = abort_policy_.reported(report.finding, report.incarnation, now_ns);
  }
  const auto notice = terminalText(report.finding.screen, path.empty() ? "" : path + ".txt", next);
  if (report.quiet) {
    // Nothing to show.
  } else if (report.ends) {
    add(action::ShowAtLauncher{notice, report.speaker});
    if (report.loop > 0) {
      add(action::EndLauncher{});
    }
  } else if (report.speaker != 0) {
    speaker_ = report.speaker;
    add(action::Show{report.speaker, notice});
  }
  if (report.crash) {
    last_words_ = notice;
    last_words_incarnation_ = report.incarnation;
  }
}

// The connection that speaks for the job: that of the first rank that has answered, whose threads
// run; else that of the first rank. 0: no rank is connected.
uint64_t Investigation::speakerOf(const Look* look) const {
  const bool of_all = look == nullptr || look->ranks().empty();
  uint64_t silent = 0;
  for (const auto& [number, rank] : facts_.ranks) {
    if (rank.connection == 0 || (!of_all && !look->hasRank(number))) {
      continue;
    }
    if (!of_all && look->answered(number)) {
      return rank.connection;
    }
    silent = silent == 0 ? rank.connection : silent;
  }
  return silent;
}

}  // namespace reft::agent
