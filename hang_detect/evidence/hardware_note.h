// What the hardware counters of a node say since the job began, in short sentences
// (agent/health/hardware_notes.h makes them). They are evidence. A note that is fatal may change
// what a crash asks for (verdict/crash.h); no note names a rank.
//
// Threads: values; the functions are re-entrant. Errors: none; damaged fields are left out.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace reft {

struct HangEvidence;

struct HardwareNote {
  int node = 0;
  // A device of the node has failed during this attempt: a lost GPU, uncorrectable ECC errors, an
  // Xid of the hardware.
  bool fatal = false;
  std::string text;  // "GPU 3 (GPU-ab12cd34): 2 uncorrectable ECC errors since the job began"

  bool operator==(const HardwareNote&) const = default;
};

constexpr size_t kMaxNotesOfNode = 32;

nlohmann::json hardwareFields(const std::vector<HardwareNote>& notes);
std::vector<HardwareNote> hardwareNotesFrom(const nlohmann::json& report);  // its "hardware"

// Moves the notes of another node to `evidence`: at most kMaxNotesOfNode, and as notes of `node`.
void addHardwareNotes(HangEvidence& evidence, std::vector<HardwareNote> notes, int node);

// For a verdict, the fatal ones first; of several nodes, each with its node.
std::vector<std::string> hardwareSentences(const HangEvidence& evidence);
// Whether a note of this node is fatal.
bool hardwareFailedOn(const HangEvidence& evidence, int node);

}  // namespace reft
