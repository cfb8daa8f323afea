// Answers the agent's stack requests (kStackRequest) with this process's stacks (kStackReply).
//
// Threads: the answer is made on `reft-agent-io`, in at most one second, without the GIL.
// Errors:  none: a dump that failed is answered with its error.
#pragma once

#include <string>
#include <string_view>

#include "hang_detect/stack_dump.h"
#include "intercept/base/agent_client.h"

namespace reft {

// The payload of kStackReply for a kStackRequest's payload: `{id, rank, pid, text, error}`.
std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump);

// Registers the handler. Call on the main thread.
void installStackReplies(AgentClient& client, int rank, StackPrinter printer);

}  // namespace reft
