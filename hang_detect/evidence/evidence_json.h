// The evidence as JSON: the part of a hang report from which a verdict can be recomputed.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence.h"

namespace reft {

// Version of the JSON form. New fields do not change it.
constexpr int kVerdictVersion = 2;

nlohmann::json evidenceFields(const OpEntry& op);
nlohmann::json evidenceFields(const RankEvidence& rank);               // without its `tail`
nlohmann::json evidenceFields(const HangEvidence& evidence);           // without its `ranks`
std::optional<HangEvidence> evidenceOf(const nlohmann::json& report);  // as evidenceFromJson()

// The evidence without a verdict, for another node. To stay within `limit` bytes it drops threads
// other than the main one and the past, then older ops, then ranks.
std::string evidenceJson(HangEvidence evidence, size_t limit = SIZE_MAX);

// Reads evidence back, from evidenceJson() or from a whole hang report; nullopt if the text is
// neither. Absent and damaged fields stay unknown.
std::optional<HangEvidence> evidenceFromJson(std::string_view text);
// Whether a report is on a crash (verdict/crash.h), and not on a hang.
bool saysCrash(std::string_view report);

}  // namespace reft
