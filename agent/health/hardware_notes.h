// What two samples of a node's hardware say, as short sentences: a pure function.
//
// A healthy device gives no note. What a device does all the time (corrected errors, a dropped
// packet now and then, clocks that the power limit lowers) gives none either: each counter has a
// threshold, in a table.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <cstdint>
#include <vector>

#include "hang_detect/evidence/hardware_note.h"
#include "hang_detect/evidence/hardware_sample.h"

namespace reft::agent {

// How an Xid is to be read, by NVIDIA's catalogue of Xid errors.
enum class XidKind : uint8_t {
  kHardware,  // the GPU or its links failed
  kProgram,   // mostly an error of the program
  kOther,
};
XidKind xidKind(int number);

struct HardwareHistory {
  HardwareSample first;    // when the job began; a device that came later: when it was first seen
  HardwareSample attempt;  // when the ranks of this attempt began
  HardwareSample newest;
};

// The notes on node `node`, those that are fatal first, at most kMaxNotesOfNode. Counts are those
// since `first`; a note is fatal only for what has come since `attempt`.
std::vector<HardwareNote> hardwareNotes(const HardwareHistory& history, int node);

}  // namespace reft::agent
