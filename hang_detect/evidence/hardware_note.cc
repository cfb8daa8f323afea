#include "hang_detect/evidence/hardware_note.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/json_fields.h"
#include "hang_detect/stacks/printable.h"

namespace reft {

namespace {

constexpr size_t kMaxNoteText = 240;
constexpr size_t kMaxNotes = 1u << 16;  // of all nodes, in a report
constexpr size_t kMaxSentences = 48;    // in a verdict

}  // namespace

nlohmann::json hardwareFields(const std::vector<HardwareNote>& notes) {
  nlohmann::json list = nlohmann::json::array();
  for (const HardwareNote& note : notes) {
    list.push_back({{"node", note.node}, {"fatal", note.fatal}, {"text", note.text}});
  }
  return list;
}

std::vector<HardwareNote> hardwareNotesFrom(const nlohmann::json& report) {
  std::vector<HardwareNote> notes;
  json_fields::each(report, "hardware", [&](const nlohmann::json& entry) {
    if (notes.size() < kMaxNotes) {
      notes.push_back({json_fields::number<int>(entry, "node", 0),
                       json_fields::flag(entry, "fatal"),
                       json_fields::text(entry, "text", kMaxNoteText)});
    }
  });
  return notes;
}

void addHardwareNotes(HangEvidence& evidence, std::vector<HardwareNote> notes, int node) {
  notes.resize(std::min(notes.size(), kMaxNotesOfNode));
  for (HardwareNote& note : notes) {
    note.node = node;
    evidence.hardware.push_back(std::move(note));
  }
}

std::vector<std::string> hardwareSentences(const HangEvidence& evidence) {
  std::vector<std::string> sentences;
  for (const bool fatal : {true, false}) {
    for (const HardwareNote& note : evidence.hardware) {
      if (note.fatal == fatal && !note.text.empty()) {
        sentences.push_back(
            (evidence.nodes > 1 ? "node " + std::to_string(note.node) + ": " : std::string()) +
            printable(note.text, kMaxNoteText));
      }
    }
  }
  if (sentences.size() > kMaxSentences) {
    const size_t more = sentences.size() - kMaxSentences;
    sentences.resize(kMaxSentences);
    sentences.push_back(std::to_string(more) + " more notes on hardware: see the JSON report");
  }
  return sentences;
}

bool hardwareFailedOn(const HangEvidence& evidence, int node) {
  return std::ranges::any_of(evidence.hardware, [node](const HardwareNote& note) {
    return note.fatal && note.node == node;
  });
}

}  // namespace reft
