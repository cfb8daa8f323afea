// Stacks of one process as data: its threads, their Python frames, and who holds the GIL.
//
// Threads: values; the functions are re-entrant.
// Errors:  none: the parser skips lines that it does not know.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reft {

struct StackFrame {
  std::string file;
  int64_t line = 0;  // 0 = unknown
  std::string function;
};

struct ThreadStack {
  std::string thread;  // "0x00007f…", as printed
  std::string name;    // "" where the interpreter prints none
  bool main = false;
  bool current = false;
  bool truncated = false;     // the printer stopped at its frame limit
  bool holds_gil = false;     // false where unknown, too
  std::string awaits_gil_of;  // thread that keeps the GIL from this one (gil_text.h); "" = none
  std::vector<StackFrame> frames;  // most recent call first
};

// A thread as the kernel lists it, with or without Python frames.
struct NativeThread {
  int64_t tid = 0;
  std::string state;
  std::string name;
};

struct Stacks {
  std::vector<ThreadStack> threads;
  std::vector<NativeThread> native;
  bool truncated = false;  // threads or frames are missing here
};

// Parses what faulthandler, StackDumper and gilText() write.
Stacks parseStacks(std::string_view text);

// A stack text together with its parsed form: parsed once, when the text is assigned.
class ProcessStacks {
 public:
  ProcessStacks() = default;
  // Implicit, so that a text can be assigned.
  ProcessStacks(std::string text)  // NOLINT(google-explicit-constructor)
      : text_(std::move(text)), parsed_(parseStacks(text_)) {}

  const std::string& text() const { return text_; }
  const Stacks& parsed() const { return parsed_; }
  // nullptr if the main thread is unknown or has no Python frames.
  const ThreadStack* mainThread() const;

 private:
  std::string text_;
  Stacks parsed_;
};

// Whether a source file belongs to the interpreter or to an installed package.
bool isLibraryFile(std::string_view file);

// The newest frame of the user's own code; the newest of all if there is none. Requires frames.
const StackFrame& ownFrame(const ThreadStack& thread);

// "train.py:88 load_batch", or "train.py:88 load_batch (inside threading.py:324 wait)" if the
// newest frame is a library's. "" without frames. Printable ASCII.
std::string placeOf(const ThreadStack& thread);

}  // namespace reft
