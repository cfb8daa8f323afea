// Parts of a hang report's JSON form: what evidenceFromJson() reads back, of which every verdict is made; and disagreements, which
// the agent's status has, too.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <optional>

#include <nlohmann/json.hpp>

#include "hang_detect/report.h"

namespace reft {

nlohmann::json evidenceFields(const OpEntry& op);
nlohmann::json evidenceFields(const RankEvidence& rank);               // without its `tail`
nlohmann::json evidenceFields(const HangEvidence& evidence);           // without its `ranks`
std::optional<HangEvidence> evidenceOf(const nlohmann::json& report);  // as evidenceFromJson()

struct Disagreement;                                           // verdict.h
nlohmann::json disagreementFields(const Disagreement& found);  // docs/hang.md

}  // namespace reft
