// Decides whether and when a reported hang ends the ranks (REFT_HANG_ACTION=abort): Note [when
// ranks are ended], abort_policy.cc. Aborter ends them.
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
    kAbort,      // now; why() says why. Comes once a report.
  };

  AbortPolicy(bool enabled, int64_t suspect_ns) : enabled_(enabled), suspect_ns_(suspect_ns) {}

  // A hang of the ranks of `incarnation` was found and its report is on disk. Returns what happens
  // next, for the terminal;
  // "": nothing.
  std::string reported(const Finding& finding, uint64_t incarnation, int64_t now_ns);
  void lookedAgain(const Finding& finding);
  // `still_ns`: how long nothing has moved in the reported episode; 0: it is over. `incarnation`:
  // of the newest ranks. `debugged`: a debugger or tracer is attached to one of them.
  Act tick(int64_t now_ns, int64_t still_ns, uint64_t incarnation, bool debugged);

  // What the last reported() was about.
  uint64_t incarnation() const { return incarnation_; }
  const std::string& why() const { return why_; }

 private:
  bool enabled_;
  int64_t suspect_ns_;
  bool pending_ = false;    // a hang is reported, and its ranks may be ended for it
  bool decided_ = false;    // the ranks may be ended before the cap
  bool looking_ = false;    // the second look is under way
  bool confirmed_ = false;  // the second look found the same
  bool far_ = false;        // the job has other nodes, whose state only a look shows
  bool seen_ = false;       // a look was taken at the cap
  bool spared_ = false;     // the last look found a debugger, or progress
  int64_t next_ns_ = 0;     // time of the next act
  uint64_t incarnation_ = 0;
  std::string summary_;  // Finding::summary of the report
  std::string why_;
};

}  // namespace reft::agent
