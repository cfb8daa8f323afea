// The investigation of hangs and deaths on one node: what the agent learns goes in, with the time;
// actions come out.
//
// It holds no clock, descriptor, file or thread, so equal inputs give equal actions. It writes log
// lines. InvestigationRunner executes its actions for the agent; the hang soak
// (tests/unit/agent/hang/) executes them on simulated ranks.
//
// An input appends actions; take them with takeActions() after each one and execute them in order.
// The calls that an action asks for are inputs, too.
//
// Threads: the agent's loop only. Errors: toolAsks() throws InvalidArgument if too many looks are
// under way.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/hang/abort_policy.h"
#include "agent/hang/actions.h"
#include "agent/hang/hang_watch.h"
#include "agent/hang/leader.h"
#include "agent/hang/look.h"
#include "hang_detect/verdict/agreement_watch.h"
#include "intercept/record/op_log.h"

namespace reft::agent {

class Investigation {
 public:
  static constexpr size_t kMaxLooks = 64;  // at a time

  struct Settings {
    std::string job;
    int node = 0;
    double suspect_sec = 20;
    bool abort_on_hang = false;
    int crash_loop_limit = 0;       // like failures in a row that end the launcher; 0: none
    int64_t tick_ns = 250'000'000;  // time between two calls of tick()
    std::string boot;               // boot id of this machine, "" if unknown
  };
  explicit Investigation(const Settings& settings);

  // The op log of a live rank, readable during the call.
  struct RankLog {
    int rank = -1;
    const OpLogReader* log = nullptr;
    bool newest = false;  // its process belongs to the newest incarnation, and wrote the log
  };

  // The ranks that have joined call this node so.
  void setNode(int node);
  // The facts for all inputs up to the next call.
  void know(NodeFacts facts) { facts_ = std::move(facts); }
  // Call every tick_ns. `traced`: a debugger or tracer is attached to a rank of this node; it may
  // be false unless wantsTracers().
  void tick(const std::vector<RankLog>& logs, bool traced, int64_t now_ns);
  bool wantsTracers(int64_t now_ns) const;
  // Call after every other input and after each tick: ends the looks that are ready.
  void advance(int64_t now_ns);

  // The process of `rank` has ended. `oom`: its cgroup's OOM killer has struck since it came.
  // `how`: its examination.
  void ended(int rank, bool oom, RankEvidence how, int64_t now_ns);
  // The first rank of the node has voted, so its terminal shows what it receives.
  void voted(int rank);
  // A tool asks for a report on these ranks; none: on all.
  void toolAsks(uint64_t connection, const std::vector<int>& ranks, int64_t now_ns);
  // The agent of another node asks; `connection` carries the answer.
  void nodeAsks(uint64_t connection, const EvidenceRequest& request, int64_t now_ns);

  // What actions ask for.
  void sampled(uint64_t look, const std::vector<ProcessSample>& samples, int64_t now_ns);
  void counted(const std::map<int, ProcessCounters>& counters, int64_t now_ns);
  void replied(uint64_t look, int rank, std::string payload);
  void readOutside(uint64_t look, int pid, RemoteStacks stacks);
  void gathering(uint64_t look, uint64_t carrier, int64_t now_ns);  // carrier 0: no rank can ask
  void gathered(uint64_t carrier, Gathered message, int64_t now_ns);
  void examined(uint64_t look, std::vector<RankEvidence> ranks, int64_t now_ns);
  // `path`: of the report without suffix. `on_disk`: it was written whole.
  void written(const action::WriteReport& report, const std::string& path, bool on_disk,
               int64_t now_ns);
  // The last text of a ShowAtLauncher is on the launcher's terminal: no need to show it again.
  void shown() { last_words_.clear(); }

  std::vector<Action> takeActions() { return std::exchange(actions_, {}); }

  uint64_t hangReports() const { return hang_reports_; }
  uint64_t crashReports() const { return crash_reports_; }
  uint64_t opDisagreements() const { return agreement_watch_.count(); }
  // The first ones of the newest incarnation.
  const std::vector<Disagreement>& disagreements() const { return disagreements_; }

 private:
  Look& start(Look::Kind kind, const std::set<int>& only, int64_t now_ns);
  Look* find(uint64_t look);
  bool looking() const;  // an own look is open, an early one aside
  bool discarded(const Look& look) const;
  HangEvidence evidenceAt(int64_t now_ns) const;  // without ranks
  HangEvidence evidenceOf(const Look& look, std::vector<RankEvidence> ranks, int64_t now_ns) const;
  void conclude(const Look& look, HangEvidence evidence, Finding finding, int64_t now_ns);
  void showSlow(const Look& look, const Finding& finding);
  void compareOps(const std::vector<RankLog>& logs, int64_t now_ns);
  void watchOtherNodes(int64_t now_ns);
  void checkAbort(bool traced, int64_t now_ns);
  void noteEnd(const RankFacts& facts, RankEvidence how, int64_t now_ns);
  void settleEnds(int64_t now_ns);
  void concludeEnds(int64_t now_ns);
  int noteRepetition(const HangEvidence& evidence, Verdict& verdict);
  uint64_t speakerOf(const Look* look) const;
  template <typename Kind>
  void add(Kind action) {
    actions_.emplace_back(std::move(action));
  }

  Settings settings_;
  HangWatch hang_watch_;
  Leader leader_;
  AbortPolicy abort_policy_;
  AgreementWatch agreement_watch_;
  NodeFacts facts_;
  std::list<Look> looks_;
  uint64_t next_look_ = 1;
  std::vector<Action> actions_;

  uint64_t leader_episode_ = 0;        // episode that leader_ knows
  int64_t announce_due_ns_ = 0;        // time to announce that this node leads
  std::map<int, Use> uses_;            // by rank; at the begin of the time under suspicion
  std::map<int, int64_t> ended_ns_;    // by rank; time at which its end was noticed
  int64_t death_due_ns_ = 0;           // time to investigate a death; 0: none
  uint64_t crash_incarnation_ = 0;     // incarnation that died of a disagreement
  uint64_t compared_incarnation_ = 0;  // incarnation whose ops agreement_watch_ reads
  std::optional<uint64_t> aborted_incarnation_;
  std::string shown_slow_;               // the wait whose slow rank was shown
  uint64_t speaker_ = 0;                 // connection that showed the last report
  std::string last_words_;               // reason for the last end, for the next incarnation
  uint64_t last_words_incarnation_ = 0;  // incarnation that ended
  uint64_t hang_reports_ = 0;

  // How ranks of one incarnation ended, until that is reported.
  std::map<int, RankEvidence> ends_;
  uint64_t ends_incarnation_ = 0;
  int64_t first_end_ns_ = 0;  // time at which the first end that was not clean was noticed
  int64_t ends_due_ns_ = 0;   // time to report; 0: no rank ended without a clean end, or it is done
  std::string failure_;       // what failed in the last crash, and at which step
  int same_failures_ = 0;     // how often in a row
  uint64_t crash_reports_ = 0;
  std::vector<Disagreement> disagreements_;
};

}  // namespace reft::agent
