// A verdict as one screen of text, and disagreements as JSON for reports and the agent's status.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/verdict.h"

namespace reft {

// Fits a terminal of 80 columns and 24 lines.
std::string verdictText(const HangEvidence& evidence, const Verdict& verdict);

// docs/hang.md lists the fields.
nlohmann::json disagreementFields(const Disagreement& found);

}  // namespace reft
