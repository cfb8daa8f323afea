// What a rank does that the others wait for, decided from its process state and its stacks.
//
// suspectRules() is a table; the first row that matches wins. The state of the process comes before
// the place of its thread (standingOf()), and that place before what the kernel reports.
// docs/hang.md lists the classes.
//
// Threads: free functions, re-entrant; the table is constant. Errors: none.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/stacks/stacks.h"

namespace reft {

// When a rank may keep the others waiting without being called hung. A rank that keeps a processor
// busy, itself or by processes that it started, always may, but for kNever.
enum class Excuse : uint8_t {
  kNever,         // it cannot come to the op by itself
  kAlways,        // healthy jobs take long there, too
  kNewPlaceOrIo,  // while the job waits at a new place, or while the rank's I/O goes on
  kNewPlace,      // while the job waits at a new place
  kNewPlaceOnly,  // the same, and its use of a processor says nothing: it may wait for a device so
};

// The fields of a rank's evidence that the rules read, derived once.
struct Suspect {
  explicit Suspect(const RankEvidence& evidence);

  const RankEvidence& rank;
  const Standing standing;                  // the thread that counts
  const ThreadStack* gil_holder = nullptr;  // keeps the GIL from it; nullptr = none
  std::string calls;                        // "file:function" of its newest frames, one a line
  std::string top_call;                     // its newest frame
  std::string place;                        // placeOf() it
};

struct SuspectRule {
  const char* name;    // in the debug log
  const char* reason;  // class word in reports
  Excuse excuse;
  bool (*matches)(const Suspect&);
  std::string (*sentence)(const Suspect&);  // continues "rank 3 "
  bool at_gil_holder = false;               // the frame to report is the GIL holder's
  bool at_last_op = false;  // it is that of the newest op, if the thread has left its program
};

// Never empty; the last row matches any rank.
std::span<const SuspectRule> suspectRules();
const SuspectRule& ruleFor(const Suspect& suspect);

// A rank that a verdict names.
struct Culprit {
  int rank = -1;
  int pid = 0;
  std::string host;
  std::string thread;               // thread of `frame`, as the stack text prints it
  std::optional<StackFrame> frame;  // where it stands or ended: the user's own code if any
  std::string reason;               // class word, as `stopped`
  std::string text;                 // one sentence
  const SuspectRule* rule = nullptr;
};

Culprit describeRank(const RankEvidence& rank);

// Of a rank whose device has not reached an op. Only the wait-for graph shows that.
const SuspectRule& deviceBehindRule();

bool isStopped(const RankEvidence& rank);
// Dead or stopped. Such a rank waits for no other, whatever its op log holds.
bool isOutOfAction(const RankEvidence& rank);

// True if the rank works in spite of the verdict: it uses a processor, reads or writes, compiles,
// or has children that do; true, too, if nothing is known. False if it is dead or stopped.
bool atWork(const RankEvidence& rank, const Culprit& culprit);
// True if the rank itself keeps a processor busy; false, too, if that is unknown.
bool usesProcessor(const RankEvidence& rank);
// True if processes that it started do: tokenizers, data workers, compilers.
bool childrenUseProcessor(const RankEvidence& rank);
// True if the rank's reads and writes go on.
bool movesData(const RankEvidence& rank);
// True if its main thread, or the one that counts, stands at the prompt of a Python debugger or
// interpreter.
bool atDebuggerPrompt(const RankEvidence& rank);

}  // namespace reft
