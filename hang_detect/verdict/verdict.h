// Which ranks hold up a job, and why: a pure function from evidence to a verdict.
//
// decide() reads no clock, no file and no process. The same evidence always gives the same verdict,
// so a verdict can be recomputed from the report that an agent wrote (evidenceFromJson()). A
// verdict names a rank only where the evidence does; otherwise it is `undecidable` and lists the
// candidates. Its parts are job_view.h, wait_graph.h (Note [wait-for graph]), suspect.h,
// disagreement.h, dead_paths.h, op_history.h and habit.h. docs/hang.md lists all classes.
//
// Threads: free functions, re-entrant.
// Errors:  none, whatever the evidence holds (except std::bad_alloc).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/dead_paths.h"
#include "hang_detect/verdict/disagreement.h"
#include "hang_detect/verdict/suspect.h"

namespace reft {

enum class VerdictState : uint8_t {
  kHealthy,  // no rank waits, or not for long enough to matter
  kSlow,     // some rank holds up others, but the job makes progress or probably will
  kHang,
  kCrash,  // ranks have ended (crash.h)
};

// What ends of ranks ask for.
enum class Remedy : uint8_t { kNone, kRetry, kExcludeNode, kFixProgram };

enum class Confidence : uint8_t { kCertain, kLikely, kUndecidable };

struct Verdict {
  VerdictState state = VerdictState::kHealthy;
  std::string what;     // class, see docs/hang.md
  std::string pattern;  // P0…P7: shape of the evidence
  Confidence confidence = Confidence::kUndecidable;
  std::vector<Culprit> culprits;    // exactly the ranks named; empty if undecidable
  std::vector<Culprit> candidates;  // if undecidable: the ranks among which the culprits are
  std::vector<int> victims;         // other ranks that wait; of a crash: that ended in consequence
  std::string group, op;            // op in which most ranks wait
  uint32_t seq = 0;
  bool at_work = false;  // some awaited rank seems to be at work: slow, until that takes too long
  bool could_come = false;  // nothing known keeps any awaited rank from coming
  double waited_sec = 0;    // since the newest sign of progress of any rank
  std::vector<Disagreement> disagreements;
  std::vector<DeadPath> dead_paths;   // of class `network`: what the culprit is, and no rank
  std::vector<std::string> evidence;  // sentences
  std::string advice;                 // next step for the user
  Remedy remedy = Remedy::kNone;      // of a crash
  bool outside = false;               // of a crash: a person or a program ended the ranks
  int64_t step = -1;                  // of a crash: the last one that the first to fail completed
};

Verdict decide(const HangEvidence& evidence);

const char* stateName(VerdictState state);
const char* confidenceName(Confidence confidence);
const char* remedyName(Remedy remedy);  // "retry", "exclude node", "fix the program", "none"

}  // namespace reft
