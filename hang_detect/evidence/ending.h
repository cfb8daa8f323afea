// How the process of a rank ended: what it said itself before (its last words), and its exit status
// as the kernel has it.
//
// The last words are JSON of at most kMostLastWords bytes: {"kind": "exception" | "thread" |
// "signal" | "leaving" | "exit", …}. `exception`: nothing caught it, so Python ends; `thread`:
// nothing caught it in a thread, which ended; `signal`: a fault of native code; `leaving`: Python
// is about to end, for whatever reason; `exit`: the exit status was not 0.
//
// Threads: values; the functions are re-entrant. Errors: addLastWords() throws InvalidArgument for
// what is no last words; else none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "hang_detect/stacks/stacks.h"

namespace reft {

constexpr size_t kMostLastWords = 1u << 20;

// An exception that nothing caught.
struct Uncaught {
  std::string type;                // "ValueError"; with its module unless that is builtins
  std::string message;             // cut
  std::string thread;              // "" = the main thread
  std::vector<StackFrame> frames;  // newest call first
  // "OSError: [Errno 28] No space left on device": what it was raised from or while handling.
  std::vector<std::string> causes;
  int error_number = 0;  // errno of an OSError; 0 = none
  int64_t at_ns = 0;     // CLOCK_MONOTONIC

  // As the stack of a thread.
  ThreadStack stack() const;
};

// A frame of a thread that failed in native code: of native code, or of Python.
struct FaultFrame {
  std::string function;  // "" = unknown
  std::string object;    // the file of native code; "" = a frame of Python
  std::string place;     // "0x1f" in the object; "train.py:3"

  bool isNative() const { return !object.empty(); }
  // "crash_here (libext.so+0x1f)"; "train.py:3 step".
  std::string text() const;
};

// A signal that faults of native code raise.
struct FatalSignal {
  int signal = 0;
  int code = 0;          // si_code
  uint64_t address = 0;  // that could not be accessed
  int sender = 0;        // process that sent it; 0 = none
  uint64_t thread = 0;   // pthread_self() of the thread, as stacks name it
  bool main = false;     // it is the main thread
  int64_t tid = 0;       // of the thread; 0 = unknown
  std::string handler;   // file of the handler that has stopped it
  // Of the C++ exception that nothing caught; "" = none.
  std::string thrown{};   // its type
  std::string message{};  // cut
  // Of the thread at the fault, newest first; empty: nothing has read them.
  std::vector<FaultFrame> frames{};
  ProcessStacks stacks{};  // Python's, of all threads
  int64_t at_ns = 0;
};

struct Ending {
  int exit_code = -1;   // < 0 = unknown, or a signal ended it
  int signal = 0;       // that ended it; 0 = none, or unknown
  int64_t left_ns = 0;  // when it began to leave, cleanly or with an exit code
  std::optional<Uncaught> exception;
  std::optional<Uncaught> in_thread;  // the newest
  std::optional<FatalSignal> fault;

  // Nothing is known of it.
  bool empty() const { return exit_code < 0 && signal == 0 && !exception && !in_thread && !fault; }
  // When it failed, before it ended; 0 = unknown.
  int64_t failedNs() const;
};

// Adds what a rank says of its end.
void addLastWords(Ending& ending, std::string_view payload);
// Adds the frames of the thread from what `reft-unwind` has read of the process while the handler
// held it; those of the handler are left out. Without the thread in `answer`, nothing is added.
void addNativeFrames(FatalSignal& fault, std::string_view answer);
// The frames, one a line; the payload of kWordsHeard.
std::string framesText(const FatalSignal& fault);
// Adds the exit status of a process, as waitpid() gives it.
void addExitStatus(Ending& ending, int status);
// The exit status of a process that has ended and that its parent has not waited for yet; < 0:
// unknown.
int exitStatusOf(int pid) noexcept;

// "SIGSEGV"; "signal 64" without a name.
std::string signalName(int signal);

nlohmann::json endingFields(const Ending& ending);
// Damaged fields stay unknown.
Ending endingOf(const nlohmann::json& fields);

}  // namespace reft
