// Starts the agent of a node.
//
// Threads: re-entrant.
// Errors:  Unavailable if the executable is absent or exits before it listens, with its reason if
// it
//          printed one; Timeout.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

// Prefix of the line that an agent prints if it cannot start; the reason follows.
inline constexpr std::string_view kAgentFailed = "failed: ";

// Runs argv[0], which daemonises itself, and returns after its first line, which reports that it
// listens. Losing the race against another starter is success: an agent listens.
void startAgent(const std::vector<std::string>& argv, std::chrono::milliseconds timeout);

}  // namespace reft
