// Parts of a hang report's JSON form: what evidenceFromJson() reads back, of which every verdict is
// made; and disagreements, which the agent's status has, too.
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

// Of the JSON form. Fields may be added under the same number.
constexpr int kVerdictVersion = 2;

nlohmann::json evidenceFields(const OpEntry& op);
nlohmann::json evidenceFields(const RankEvidence& rank);               // without its `tail`
nlohmann::json evidenceFields(const HangEvidence& evidence);           // without its `ranks`
std::optional<HangEvidence> evidenceOf(const nlohmann::json& report);  // as evidenceFromJson()

// The evidence without a verdict, for another node: evidenceFromJson() reads it. Not longer than
// `limit`: threads besides the main one are left out for that, then older ops, then ranks.
std::string evidenceJson(HangEvidence evidence, size_t limit = SIZE_MAX);

// The evidence in a hang report's JSON form; nullopt if it is none. Fields that are absent or
// damaged stay unknown.
std::optional<HangEvidence> evidenceFromJson(std::string_view text);

}  // namespace reft
