// What the agent tells its ranks about a verdict: the text for the terminal of the job (kVerdict),
// and to end (kAbort).
//
// Threads: both are received on `reft-agent-io`; what may block is done on threads of their own
// (`reft-verdict`,
//          `reft-abort`), as a terminal may be stopped and a communicator may not come back. None
//          takes the GIL.
// Errors:  none: a text that cannot be written within a second is lost; the agent's log has it,
// too.
//
// On kAbort the main thread is parked in a signal handler before the communicators end: an op that
// is aborted returns, and a training loop must not go on with what it got, let alone seal a
// snapshot of it. Where it cannot be parked in time, they end with the process. Neither handlers of
// exit() nor destructors run.
#pragma once

#include <string>
#include <string_view>

#include "intercept/link/agent_client.h"

namespace reft {

// Any failure makes a launcher start ranks again; this one is EX_TEMPFAIL, "try again".
constexpr int kAbortExitCode = 75;

// `screen` (verdictText()) with where the report is and what happens next, still within 80 columns
// and 24 lines: details of the evidence make room. `action` may be empty.
std::string terminalText(std::string_view screen, std::string_view report_path,
                         std::string_view action);

// {"text": …}, the payload of kVerdict.
std::string verdictNoticeJson(std::string_view text);
// Its text, "" if it is none.
std::string verdictNoticeText(std::string_view payload);

// Ends the communicators of this process, so that peers do not wait for it; may block.
using EndCommunicators = void (*)();

// Registers both handlers, and takes a real-time signal that nobody uses. Call on the main thread.
// On kAbort: `end`, for at most two seconds, then _exit(kAbortExitCode).
void installVerdictNotices(AgentClient& client, EndCommunicators end = nullptr);

}  // namespace reft
