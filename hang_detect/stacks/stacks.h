// Stacks of one process as data: threads, their Python frames, and what is known about the GIL.
//
// Threads: values; parseStacks is re-entrant. Errors: none: lines that it does not know are
// skipped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

struct StackFrame {
  std::string file;
  int64_t line = 0;  // 0 = unknown
  std::string function;
};

struct ThreadStack {
  std::string thread;  // "0x00007f…", as printed
  std::string name;    // where the interpreter prints one
  bool main = false;
  bool current = false;
  bool truncated = false;     // the printer stopped at its frame limit
  bool holds_gil = false;     // false, too, where that is not known
  std::string awaits_gil_of;  // thread that keeps it from taking the GIL (gil_text.h); "": none, or
                              // not known
  std::vector<StackFrame> frames;  // most recent call first
};

// A thread as the kernel sees it, with or without Python frames.
struct NativeThread {
  int64_t tid = 0;
  std::string state;
  std::string name;
};

struct Stacks {
  std::vector<ThreadStack> threads;
  std::vector<NativeThread> native;
  bool truncated = false;  // more threads or frames than are kept here
};

// Reads what faulthandler, dumpStacks() and gilText() write. Lines that it does not know are
// skipped.
Stacks parseStacks(std::string_view text);

}  // namespace reft
