// Two messages of the agent to its ranks: the text of a verdict for the terminal of the job
// (kVerdict), and the order to end (kAbort).
//
// On kAbort a signal handler parks the main thread before the communicators end: an aborted op
// returns, and the training loop must not go on with its result, let alone seal a snapshot of it.
// If the main thread cannot be parked in time, the communicators end with the process. Neither
// handlers of exit() nor destructors run.
//
// Threads: `reft-agent-io` receives both. Threads of their own (`reft-verdict`, `reft-abort`) do
//          what may block, as a terminal may be stopped and a communicator may not return. None
//          takes the GIL. State shared with them is atomic; there is no lock.
// Errors:  none: a text that cannot be written within a second is lost, but is in the agent's log.
#pragma once

#include <string>
#include <string_view>

#include "intercept/link/agent_client.h"

namespace reft {

// EX_TEMPFAIL. Any exit code but 0 makes a launcher start the ranks again.
constexpr int kAbortExitCode = 75;

// `screen` (from verdictText()), the path of the report and the next action, within 80 columns and
// 24 lines: sentences of evidence make room for them. `action` may be empty.
std::string terminalText(std::string_view screen, std::string_view report_path,
                         std::string_view action);

// {"text": …}, the payload of kVerdict.
std::string verdictNoticeJson(std::string_view text);
// The text of such a payload; "" if malformed.
std::string verdictNoticeText(std::string_view payload);

// Ends the communicators of this process, which releases its peers; may block.
using EndCommunicators = void (*)();

// Registers both handlers and claims an unused real-time signal; to be called on the main thread.
// kAbort runs `end` for at most two seconds, then _exit(kAbortExitCode).
void installVerdictNotices(AgentClient& client, EndCommunicators end = nullptr);

}  // namespace reft
