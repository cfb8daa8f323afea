// Whether and when a reported hang ends the ranks (REFT_HANG_ACTION=abort).
//
// See Note [when ranks are ended], abort_policy.cc. Who is ended, and how, is the agent's: this
// decides only.
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
  bool decided_ = false;    // it need not last until the cap
  bool looking_ = false;    // the second look is under way
  bool confirmed_ = false;  // and has found the same
  bool far_ =
      false;  // ranks of other nodes hang with these: what happens there shows in a look only
  bool seen_ = false;    // such a look came when the cap was reached
  bool spared_ = false;  // and found a debugger, or progress
  int64_t next_ns_ = 0;  // not before
  uint64_t incarnation_ = 0;
  std::string summary_;
  std::string why_;
};

}  // namespace reft::agent
