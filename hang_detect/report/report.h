// The hang report: the verdict and the evidence about each rank, as text and as JSON.
//
// Threads: free functions, re-entrant. Errors: none, whatever the evidence holds (except
// std::bad_alloc).
#pragma once

#include <string>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/verdict.h"

namespace reft {

// docs/hang.md lists the fields.
std::string hangReportJson(const HangEvidence& evidence, const Verdict& verdict);
// At most 80 columns.
std::string hangReportText(const HangEvidence& evidence, const Verdict& verdict);

}  // namespace reft
