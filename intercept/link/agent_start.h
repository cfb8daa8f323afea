// Starts the agent of a node. Threads: re-entrant. Errors: Unavailable (no such executable, or it
// exits without having said that it listens; with its reason if it gave one), Timeout.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

// How the line of an agent begins that cannot start; what follows is the reason.
inline constexpr std::string_view kAgentFailed = "failed: ";

// Runs argv[0] (which daemonises itself) and returns when it has printed its first line, which says
// that it listens. Losing the race against another starter is success: some agent listens.
void startAgent(const std::vector<std::string>& argv, std::chrono::milliseconds timeout);

}  // namespace reft
