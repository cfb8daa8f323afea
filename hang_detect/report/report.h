// The hang report: the evidence about each rank and the verdict on it, as text and as JSON.
//
// Threads: free functions, re-entrant. Errors: none, whatever the evidence holds (except
// std::bad_alloc).
#pragma once

#include <string>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/verdict.h"

namespace reft {

// Never throw, whatever the evidence holds (except std::bad_alloc).
std::string hangReportJson(const HangEvidence& evidence,
                           const Verdict& verdict);  // fields: docs/hang.md
std::string hangReportText(const HangEvidence& evidence,
                           const Verdict& verdict);  // at most 80 columns

}  // namespace reft
