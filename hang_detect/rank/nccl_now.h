// What NCCL waits for in this process now, if its profiler plugin is on (REFT_NCCL_PROFILER).
//
// Threads: any. Errors: none; what cannot be read is missing.
#pragma once

#include <vector>

#include "hang_detect/evidence/nccl_progress.h"

namespace reft {

std::vector<NcclFinding> ncclFindingsNow();

}  // namespace reft
