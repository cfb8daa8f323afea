// Writes where the launcher of the ranks writes its errors: ranks that fail are gone too soon.
//
// Only to a terminal, a pipe, or a file that is appended to: in another file, what the launcher
// writes next would go over it. Never blocks: what a full pipe or a stopped terminal does not take
// is lost here, but is in the agent's log and in the report.
//
// Threads: re-entrant. Errors: none: false if it was not written.
#pragma once

#include <string_view>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

// `pidfd`: of the process `pid`.
bool writeToStderrOf(int pid, const UniqueFd& pidfd, std::string_view text);

}  // namespace reft::agent
