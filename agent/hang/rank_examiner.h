// What the agent can learn about a rank without asking it: its process, op log and counters.
//
// Threads: the agent's loop only. Errors: none: what cannot be read is unknown, and
// RankEvidence::error names it.
#pragma once

#include <cstdint>
#include <optional>

#include "agent/hang/look.h"
#include "agent/peers/rank_table.h"
#include "hang_detect/evidence/evidence.h"
#include "intercept/record/op_log.h"

namespace reft::agent {

NodeFacts factsOf(RankTable& ranks);
// nullopt without a vault, or if the vault holds no op log.
std::optional<OpLogReader> opLogOf(RankState& rank);
ProcessSample sampleOf(const RankState& rank, bool children);
RankEvidence examine(RankState& rank, int node, int64_t now_ns);

}  // namespace reft::agent
