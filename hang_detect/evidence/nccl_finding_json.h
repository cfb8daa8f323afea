// Findings about NCCL's progress as JSON, which travels from a rank to the agent that decides.
//
// Threads: free functions, re-entrant.
// Errors:  none (except std::bad_alloc): a field that is absent or of another type is unknown.
#pragma once

#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "hang_detect/evidence/nccl_progress.h"

namespace reft {

nlohmann::json ncclFields(const std::vector<NcclFinding>& findings);
// At most 64 findings, with 256 edges each.
std::vector<NcclFinding> ncclFindingsFrom(const nlohmann::json& fields);

}  // namespace reft
