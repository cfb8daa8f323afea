#include "agent/hang/abort_policy.h"

#include <algorithm>

#include "intercept/base/clock.h"

// Note [when ranks are ended]
// Ending a job that would have recovered is worse than letting a job hang for a few more minutes:
// the job's own timeouts end a hang in the end. So the agent ends ranks
// - early, if the verdict is certain or likely, a second look found the same ranks at the same
//   lines, and no culprit is at work: using a processor, reading or writing, compiling, or with
//   children that do. Without that last condition, a rank that runs an evaluation while the others
//   are in the next step's all_reduce is indistinguishable from a hang;
// - else once nothing has moved for kHardCapFactor times REFT_HANG_SUSPECT_SEC;
// - never while a debugger is attached to a rank, or shortly after, because debuggers cause hangs.
//   On other nodes only a second look can find a debugger, so one precedes the cap. A rank at a
//   Python debugger's prompt is never ended;
// - not at once if a rank is dead: launchers end the other ranks themselves, and give SIGTERM
//   handlers time to run. The agent acts only if the launcher does nothing within kLauncherNs.
// Progress, a rank that joins or leaves, and a new incarnation each cancel the abort.

namespace reft::agent {

namespace {

constexpr int64_t kHardCapFactor = 10;
constexpr int64_t kLongestConfirmNs = 5 * kSecond;
// torchrun kills the remaining ranks 30 s after it has asked them to end.
constexpr int64_t kLauncherNs = 35 * kSecond;

std::string secondsOf(int64_t ns) {
  return std::to_string((ns + kSecond - 1) / kSecond) + " s";
}

}  // namespace

std::string AbortPolicy::reported(const Finding& finding, uint64_t incarnation, int64_t now_ns) {
  pending_ = decided_ = looking_ = confirmed_ = seen_ = spared_ = false;
  far_ = finding.nodes > 1;
  if (!enabled_) {
    return "";
  }
  if (finding.prompt) {
    return "the ranks do not end: a rank is at a debugger prompt (REFT_HANG_ACTION=abort)";
  }
  pending_ = true;
  incarnation_ = incarnation;
  summary_ = finding.summary;
  decided_ = finding.confidence != Confidence::kUndecidable && !finding.at_work;
  const int64_t wait_ns =
      finding.somebody_died ? kLauncherNs : std::min(suspect_ns_ / 2, kLongestConfirmNs);
  next_ns_ = now_ns + wait_ns;
  return std::string("if nothing moves ") +
         (decided_ ? "within " + secondsOf(wait_ns)
                   : "for " + secondsOf(kHardCapFactor * suspect_ns_)) +
         ", the ranks end, so that the launcher restarts them (REFT_HANG_ACTION=abort)";
}

void AbortPolicy::lookedAgain(const Finding& finding) {
  if (!looking_) {
    return;  // result for an earlier report
  }
  looking_ = false;
  spared_ = far_ && (finding.traced || finding.state != VerdictState::kHang);
  confirmed_ = finding.state == VerdictState::kHang &&
               finding.confidence != Confidence::kUndecidable && !finding.at_work && !spared_ &&
               finding.summary == summary_;
  decided_ = confirmed_;  // else only the cap remains
  pending_ = pending_ && !finding.prompt;
  why_ = "the verdict is " + std::string(confidenceName(finding.confidence)) +
         ", and a second look confirms it";
}

AbortPolicy::Act AbortPolicy::tick(int64_t now_ns, int64_t still_ns, uint64_t incarnation,
                                   bool debugged) {
  pending_ = pending_ && still_ns > 0 && incarnation == incarnation_;
  if (!pending_) {
    return Act::kNothing;
  }
  if (debugged || spared_) {
    next_ns_ = now_ns + suspect_ns_;
    confirmed_ = seen_ = spared_ = false;
    return Act::kNothing;
  }
  if (now_ns < next_ns_ || looking_) {
    return Act::kNothing;
  }
  if (still_ns >= kHardCapFactor * suspect_ns_ && !confirmed_) {
    if (far_ && !seen_) {
      seen_ = looking_ = true;
      return Act::kLookAgain;
    }
    why_ = "nothing has moved for " + secondsOf(still_ns);
    pending_ = false;
    return Act::kAbort;
  }
  if (confirmed_) {
    pending_ = false;
    return Act::kAbort;
  }
  looking_ = decided_;
  return decided_ ? Act::kLookAgain : Act::kNothing;
}

}  // namespace reft::agent
