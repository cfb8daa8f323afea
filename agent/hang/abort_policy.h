// Decides whether and when to end the ranks after a reported hang (REFT_HANG_ACTION=abort). See
// Note [when ranks are ended] in abort_policy.cc. Aborter ends them.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>
#include <string>

#include "agent/hang/finding.h"

namespace reft::agent {

class AbortPolicy {
 public:
  enum class Act {
    kNothing,
    kLookAgain,  // collect the evidence again and hand it to lookedAgain()
    kAbort,      // end the ranks now, for the reason in why(); at most once per report
  };

  AbortPolicy(bool enabled, int64_t suspect_ns) : enabled_(enabled), suspect_ns_(suspect_ns) {}

  // Call once the report of a hang of the ranks of `incarnation` is on disk. Returns what happens
  // next, for the terminal, or "" if nothing does.
  std::string reported(const Finding& finding, uint64_t incarnation, int64_t now_ns);
  void lookedAgain(const Finding& finding);
  // `still_ns`: time without progress in the reported episode; 0: the episode is over.
  // `incarnation`: incarnation of the newest ranks. `debugged`: a debugger or tracer is attached to
  // one of them.
  Act tick(int64_t now_ns, int64_t still_ns, uint64_t incarnation, bool debugged);

  // Incarnation of the last reported(); reason of the last kAbort.
  uint64_t incarnation() const { return incarnation_; }
  const std::string& why() const { return why_; }

 private:
  bool enabled_;
  int64_t suspect_ns_;
  bool pending_ = false;    // a hang is reported and may still end its ranks
  bool decided_ = false;    // the ranks may be ended before the cap
  bool looking_ = false;    // the second look is in progress
  bool confirmed_ = false;  // the second look found the same
  bool far_ = false;        // the job has other nodes, whose state only a second look shows
  bool seen_ = false;       // a second look was requested at the cap
  bool spared_ = false;     // the second look found a debugger, or progress
  int64_t next_ns_ = 0;     // earliest time of the next act
  uint64_t incarnation_ = 0;
  std::string summary_;  // Finding::summary of the report
  std::string why_;
};

}  // namespace reft::agent
