// Answers the agent's stack requests (kStackRequest) with this process's stacks (kStackReply).
//
// Threads: `reft-agent-io` makes the answer, in at most one second and without the GIL.
// Errors:  none: the answer to a failed dump holds its error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/driver_use.h"
#include "hang_detect/evidence/nccl_progress.h"
#include "hang_detect/stacks/stack_dump.h"
#include "intercept/link/agent_client.h"

namespace reft {

// The payload of kStackReply for a kStackRequest's payload: `{id, rank, pid, text, error, driver,
// nccl}`. addStackReply() reads it.
std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump,
                           const DriverUse& driver = {}, const std::vector<NcclFinding>& nccl = {});

// Registers the handler; to be called on the main thread. Also permits the agent to read this
// process's memory where the kernel lets only parents do so (Yama), for a time when the process
// cannot answer any more.
void installStackReplies(AgentClient& client, int rank, StackPrinter printer);

}  // namespace reft
