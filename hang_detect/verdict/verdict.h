// Who holds up a job, and why: a pure function from the evidence about its ranks to a verdict.
//
// No clock, no file, no process is looked at: the same evidence always gives the same verdict, so
// one can be replayed from what the agent wrote (`evidenceFromJson`). How it decides is in Note
// [wait-for graph], verdict.cc. A verdict names a rank only where the evidence does; else it is
// `undecidable` and says between whom. docs/hang.md lists all classes.
//
// Threads: free functions, re-entrant.
// Errors:  none, whatever the evidence holds (except std::bad_alloc).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/stacks/stacks.h"

namespace reft {

enum class VerdictState : uint8_t {
  kHealthy,  // nobody waits, or not for long enough to be worth a word
  kSlow,     // somebody holds up others, but progress is seen or likely
  kHang,
};

enum class Confidence : uint8_t { kCertain, kLikely, kUndecidable };

struct Culprit {
  int rank = -1;
  int pid = 0;
  std::string host;
  std::string thread;  // of `frame`, as the stack text calls it
  std::optional<StackFrame>
      frame;  // of its main thread, or of who keeps the GIL from it; the user's own code if any
  std::string reason;  // a class word, as `stopped`
  std::string text;    // a sentence
};

// Ranks disagree about one op. May be seen although nothing hangs.
struct Disagreement {
  std::string what;  // op_mismatch | size_mismatch | dtype_mismatch | root_mismatch
  std::string group;
  uint32_t seq = 0;
  std::vector<int> minority;  // empty: no strict majority of the group, so either side may be wrong
  std::vector<int> ranks;     // all whose op of this number is known
  bool waited_for = false;    // ranks wait in the group, or failed in it, since
  std::string text;
};

struct Verdict {
  VerdictState state = VerdictState::kHealthy;
  std::string what;     // class, see docs/hang.md
  std::string pattern;  // P0…P7: the shape of the evidence
  Confidence confidence = Confidence::kUndecidable;
  std::vector<Culprit> culprits;    // exactly those named; empty if undecidable
  std::vector<Culprit> candidates;  // undecidable: between whom
  std::vector<int> victims;         // ranks that wait, not counting the above
  std::string group, op;            // the op that most ranks wait in
  uint32_t seq = 0;
  bool at_work = false;     // of those who are waited for, somebody is taken to be at work: slow,
                            // until that takes too long
  bool could_come = false;  // and nothing is known that keeps any of them from coming
  double waited_sec = 0;    // since the newest sign of progress of any rank
  std::vector<Disagreement> disagreements;
  std::vector<std::string> evidence;  // sentences
  std::string advice;                 // what to do next
};

Verdict decide(const HangEvidence& evidence);

// Whether there are signs that the rank does something, in spite of the verdict: it uses a
// processor, reads or writes, has children that do, or compiles; or nothing is known about that.
// Who is stopped or dead does not.
bool atWork(const RankEvidence& rank, const Culprit& culprit);

// Whether somebody sits at a Python debugger's or interpreter's prompt in its main thread.
bool atDebuggerPrompt(const RankEvidence& rank);

const char* stateName(VerdictState state);
const char* confidenceName(Confidence confidence);

}  // namespace reft
