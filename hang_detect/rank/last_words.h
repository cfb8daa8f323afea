// What a rank says to its agent before it ends (kLastWords, hang_detect/evidence/ending.h).
//
// A fault of native code (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) stops the thread in a handler
// while a thread of its own reads the Python stacks of all threads and sends them, and the agent
// reads the native frames of the thread (kWordsHeard says that it has). That takes 1.5 s at most.
// With SIGABRT goes the C++ exception that nothing caught (thrown.h).
// Then the signal has its old effect: the handler that was there before, a core
// dump, the same exit status. A handler is installed only where there is none, or one of Python's
// (faulthandler); a forked child has its own end. torchrun's error file (TORCHELASTIC_ERROR_FILE)
// gets the signal and the stacks, too, unless there is one.
//
// Threads: installFaultWords() on the main thread; `reft-last-words` sends. The handler calls only
//          what may be called in one.
// Errors:  none: what cannot be sent is lost, and the agent has the exit status alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "hang_detect/evidence/ending.h"
#include "hang_detect/stacks/stack_dump.h"
#include "intercept/link/agent_client.h"

namespace reft {

// {"kind": "leaving", "at_ns"}: Python is about to end.
std::string leavingWords(int64_t at_ns);
// {"kind": "exit", "code", "at_ns"}: the process, which was leaving then, has this exit status.
std::string exitWords(int code, int64_t at_ns);
// {"kind": "signal", …}: addLastWords() reads it.
std::string faultWords(const FatalSignal& fault);

// Writes torchrun's error file, whole or not at all, unless `path` is "" or something has written
// it. `seconds`: since 1970.
void writeErrorFile(const std::string& path, const std::string& what, const std::string& stacks,
                    int64_t seconds);

// Registers the handlers. A later call replaces the client.
void installFaultWords(const std::shared_ptr<AgentClient>& client, StackPrinter printer);

}  // namespace reft
