// Decides when the ranks of a node look hung: no rank has moved its op log for a while and some op
// is pending. hang_detect gives the verdict; there is one report an episode. An episode is a time
// without progress: it ends when a rank moves its op log, joins or goes.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "agent/hang/finding.h"
#include "hang_detect/verdict/verdict.h"
#include "intercept/record/op_log.h"

namespace reft::agent {

struct Progress {
  uint64_t ops = 0;
  uint64_t heartbeat_ns = 0;
  // One of the newest ops has begun and is not done, or the newest op has failed.
  bool pending = false;
};

Progress progressOf(const OpLogReader& log);

class HangWatch {
 public:
  // `tick_ns`: time between two calls of look() when all is well; 0: unknown.
  explicit HangWatch(int64_t suspect_ns, int64_t tick_ns = 0)
      : suspect_ns_(suspect_ns), tick_ns_(tick_ns) {}

  // Call at each tick, before suspect(), and before evidence is judged. Time in which the agent
  // itself did not run does not count against the ranks: in a suspended virtual machine, or on a
  // stopped node, they stood still with their observer.
  void look(int64_t now_ns);
  // True when a verdict is due: no live rank has moved for suspect_ns and a live rank has a pending
  // op. True again after each further suspect_ns, until reported() or the end of the episode.
  bool suspect(const std::map<int, Progress>& live, int64_t now_ns);
  // Takes what a look found; true if it is a hang to report. A rank that was at work at the look
  // before may be on its way to the op that the others wait for: then only the next look decides.
  bool credible(const Finding& finding);
  // True once an episode in which an op is pending, after three quarters of suspect_ns: time to
  // learn, within earlyWaitNs(), whether a rank is at work.
  bool early(int64_t now_ns);
  int64_t earlyWaitNs() const { return suspect_ns_ / 8; }
  void lookedEarly(const Verdict& verdict) { at_work_ = verdict.at_work; }
  // Newest mark in any op log: it identifies the episode.
  uint64_t episode() const { return newest_mark_ns_; }
  // Age of a reported episode without the agent's own absence; 0: no episode is reported.
  int64_t reportedStillNs(int64_t now_ns) const {
    return reported_ ? now_ns - static_cast<int64_t>(newest_mark_ns_) - awayNs() : 0;
  }
  // The agent's own absence in this episode.
  int64_t awayNs() const { return away_ns_; }
  // The episode needs no further verdict, except `more_looks`: ranks or nodes that have not
  // answered may do so then.
  void reported(int more_looks = 0) {
    reported_ = true;
    looks_left_ = more_looks;
  }
  // True once an episode, after half of suspect_ns: time to note what processes have used so far.
  bool halfway(int64_t now_ns);
  // halfway() was true in this episode, so what was noted is of it.
  bool noted() const { return noted_; }

 private:
  int64_t suspect_ns_;
  int64_t tick_ns_;
  int64_t looked_ns_ = 0;  // last look()
  int64_t absent_ns_ = 0;  // length of the agent's last absence
  int64_t back_ns_ = 0;    // end of the agent's last absence
  int64_t away_ns_ = 0;    // awayNs()
  bool reported_ = false;
  int looks_left_ = 0;  // looks due after the report
  bool noted_ = false;  // halfway() was true
  bool pending_ = false;
  bool looked_early_ = false;  // early() was true
  bool at_work_ = false;       // a rank that others wait for was at work at the last look
  uint64_t newest_mark_ns_ = 0;
  size_t live_ranks_ = 0;
  int64_t next_ns_ = 0;  // time of the next verdict
};

}  // namespace reft::agent
