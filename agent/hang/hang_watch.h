// When the ranks of a node look hung: no rank moved its op log for a while and some op is pending;
// or a rank has died under the others. The verdict on it is hang_detect's; one report an episode.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "agent/hang/outside_stacks.h"
#include "agent/peers/rank_table.h"
#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/verdict/verdict.h"
#include "intercept/record/op_log.h"

namespace reft::agent {

struct Progress {
  uint64_t ops = 0;
  uint64_t heartbeat_ns = 0;
  bool pending = false;  // some op of the newest ones has begun and is not done, or the newest of
                         // all has failed
};

Progress progressOf(const OpLogReader& log);
// From the mapped op log; nullopt without a (valid) one.
std::optional<Progress> readProgress(RankState& rank);

struct Report;

class HangWatch {
 public:
  // `tick_ns`: how often look() comes when nothing is wrong; 0: not known.
  explicit HangWatch(int64_t suspect_ns, int64_t tick_ns = 0)
      : suspect_ns_(suspect_ns), tick_ns_(tick_ns) {}

  // To be called at each tick, before suspect(), and before evidence is judged. What the agent has
  // not seen itself is not held against the ranks: a virtual machine that was suspended, or a whole
  // node that was stopped, stood still with its observer.
  void look(int64_t now_ns);
  // True when a verdict is due: every live rank stood still for suspect_ns and some live rank has a
  // pending op. Then again after every further suspect_ns, until reported() or until some rank
  // moves, joins or goes.
  bool suspect(const std::map<int, Progress>& live, int64_t now_ns);
  // What a look found; true if it is a hang to be reported. Who was at work at the look before may
  // just have come out of it, on the way to the op that is waited for: then only the next look
  // tells.
  bool credible(const Report& report);
  // True once an episode in which an op is pending, when three quarters of suspect_ns are over:
  // whether somebody is at work then is to be found out within earlyWaitNs().
  bool early(int64_t now_ns);
  int64_t earlyWaitNs() const { return suspect_ns_ / 8; }
  void lookedEarly(const Verdict& verdict) { at_work_ = verdict.at_work; }
  // The newest mark that was seen: another one is another episode.
  uint64_t episode() const { return seen_ns_; }
  // How long nothing has moved in an episode whose report is written; 0: there is none.
  int64_t reportedStillNs(int64_t now_ns) const {
    return reported_ ? now_ns - static_cast<int64_t>(seen_ns_) - awayNs() : 0;
  }
  // How long of that time the agent itself was away.
  int64_t awayNs() const { return away_ns_; }
  // This episode needs no further verdict; but `more_looks` come, as somebody may answer then who
  // has not so far.
  void reported(int more_looks = 0) {
    reported_ = true;
    looks_left_ = more_looks;
  }
  // True once an episode, when half of suspect_ns is over: the time to note what processes have
  // used so far.
  bool halfway(int64_t now_ns);

 private:
  int64_t suspect_ns_;
  int64_t tick_ns_;
  int64_t looked_ns_ = 0;
  int64_t unseen_ns_ = 0;  // how long the agent itself was away, last
  int64_t back_ns_ = 0;    // until then
  int64_t away_ns_ = 0;    // in this episode
  bool reported_ = false;
  int looks_left_ = 0;  // after the report
  bool noted_ = false;
  bool pending_ = false;
  bool looked_early_ = false;
  bool at_work_ = false;  // somebody who is waited for was, at the last look
  uint64_t seen_ns_ = 0;
  size_t seen_ranks_ = 0;
  int64_t next_ns_ = 0;
};

// What a rank's process had used at some time.
struct Noted {
  int64_t at_ns = 0;
  ProcessCounters counters;
};

// Fills cpu_share and io_bytes from what was used between two times, as far as that is known.
void addUse(RankEvidence& rank, const Noted& then, const Noted& used);

// What the agents of other nodes say about a hang.
struct NodesAsked {
  bool wanted = false;
  bool over = false;
  uint64_t carrier = 0;  // connection of the rank that asks
  int64_t asked_ns = 0;
  int64_t deadline_ns = 0;
  struct Answer {
    NodeAnswer said;
    int64_t at_ns = 0;  // when it came
  };
  std::vector<Answer> answers;
  std::vector<int> silent;
  std::string problem;
};

// Answers to one stack_request, waited for until `deadline_ns`.
struct StackCollection {
  uint64_t id = 0;
  uint64_t requester = 0;  // connection of the tool; 0: the watch, the report goes to files
  bool confirms = false;   // the second look of AbortPolicy
  bool early = false;      // HangWatch::early(): nobody else is asked, and nobody waited for long
  bool crash = false;   // a rank has just ended: of interest if ranks disagreed about an op; nobody
                        // is asked, most end as well
  bool looked = false;  // at the crash, once
  uint64_t node_request = 0;  // not 0: for another node; `requester` and `askers` carry the answer
  std::vector<uint64_t> askers;  // further connections that wait for it
  int64_t asked_ns = 0;
  NodesAsked nodes;
  uint64_t incarnation = 0;
  int64_t deadline_ns = 0;
  std::map<int, std::optional<std::string>> replies;  // rank → payload
  std::map<int, Noted> used;   // by rank, before it was asked: an answer costs time, too
  OutsideStacks outside;       // of those that do not answer
  bool asked_outside = false;  // of all of them
  bool complete() const;
};

struct Report {
  VerdictState state;
  Confidence confidence;
  std::string json, text, screen;
  // For AbortPolicy:
  std::string finding;  // class, and who is named at which lines: equal if two looks found the same
  bool at_work =
      false;  // somebody who is named uses processors, files or children, or that is not known
  bool prompt = false;         // somebody sits at a Python debugger's prompt
  bool somebody_died = false;  // without a clean end
  bool disagreement = false;   // about an op; it is what the verdict says
  bool traced = false;         // a debugger or tracer is attached to somebody, on whatever node
  int nodes = 1;               // of the job
  bool silent = false;         // some of them are
  // For HangWatch, as Verdict:
  bool excused = false;
  bool could_come = false;
};
// What is known here about the ranks of this node. `noted` (what was used at the beginning of the
// time that is looked at) and `gone_ns` (when a rank's end was noticed) may lack ranks.
HangEvidence nodeEvidence(RankTable& ranks, const StackCollection& collection,
                          const std::string& job, int node, double suspect_sec, int64_t now_ns,
                          const std::map<int, Noted>& noted = {},
                          const std::map<int, int64_t>& gone_ns = {}, int64_t away_ns = 0);
Report judge(const HangEvidence& evidence);

}  // namespace reft::agent
