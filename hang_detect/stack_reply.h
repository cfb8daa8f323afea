// Answers the agent's stack requests (kStackRequest) with this process's stacks (kStackReply).
//
// Threads: the answer is made on `reft-agent-io`, in at most one second, without the GIL.
// Errors:  none: a dump that failed is answered with its error.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "hang_detect/stack_dump.h"
#include "intercept/base/agent_client.h"

namespace reft {

// What OpEntry::call_site means in this process. Must neither block nor take the GIL.
using CallSites = std::map<uint32_t, std::string> (*)();

// The payload of kStackReply for a kStackRequest's payload: `{id, rank, pid, text, error, call_sites: {"7": "…"}}`.
// addStackReply() reads it.
std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump,
                           const std::map<uint32_t, std::string>& call_sites = {});

// Registers the handler. Call on the main thread. The agent is allowed to read this process's memory where the kernel allows
// that to parents only (Yama), for the time when it cannot answer any more.
void installStackReplies(AgentClient& client, int rank, StackPrinter printer, CallSites call_sites = nullptr);

}  // namespace reft
