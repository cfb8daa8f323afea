// Answers the agent's stack requests (kStackRequest) with this process's stacks (kStackReply).
//
// Threads: the answer is made on `reft-agent-io`, in at most one second, without the GIL.
// Errors:  none: a dump that failed is answered with its error.
#pragma once

#include <string>
#include <string_view>

#include "hang_detect/stacks/stack_dump.h"
#include "intercept/link/agent_client.h"

namespace reft {

// The payload of kStackReply for a kStackRequest's payload: `{id, rank, pid, text, error}`.
// addStackReply() reads it.
std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump);

// Registers the handler. Call on the main thread. The agent is allowed to read this process's
// memory where the kernel allows that to parents only (Yama), for the time when it cannot answer
// any more.
void installStackReplies(AgentClient& client, int rank, StackPrinter printer);

}  // namespace reft
