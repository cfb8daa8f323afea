// A verdict as the agent acts on it: its texts, and what HangWatch and AbortPolicy decide by.
//
// Threads: values; judge() is re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <string>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/verdict.h"

namespace reft::agent {

struct Finding {
  VerdictState state = VerdictState::kHealthy;
  Confidence confidence = Confidence::kUndecidable;
  std::string json, text;  // report for files and tools
  std::string screen;      // summary for a terminal
  std::string summary;     // class, culprits and their lines; equal in looks that found the same
  bool at_work = false;    // a culprit uses processors, files or children, or that is unknown
  bool prompt = false;     // a rank is at a Python debugger's prompt
  bool somebody_died = false;  // without a clean end
  bool disagreement = false;   // the verdict is that ranks disagree about an op
  bool traced = false;         // a debugger or tracer is attached to a rank of any node
  int nodes = 1;               // of the job
  bool silent = false;         // some nodes did not answer
  bool excused = false;        // Verdict::at_work
  std::string wait;            // group and number of the op that ranks wait in
  bool could_come = false;     // Verdict::could_come
};

Finding judge(const HangEvidence& evidence);
// Of a verdict that is known.
Finding findingOf(const HangEvidence& evidence, const Verdict& verdict);

}  // namespace reft::agent
