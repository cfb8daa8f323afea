// All threads' Python stacks of this process as text, without the GIL.
//
// This folder knows no Python: a StackPrinter, given by python/bindings/hang.cc, writes the stacks to a descriptor. It
// runs on a thread of its own, so that a printer that blocks holds up nobody; lines about native threads are added.
//
// Threads: dump() from any thread; a second dump() while the first runs waits its turn within the same deadline.
// Errors:  none: what went wrong is in StackDump::error.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace reft {

// Writes the stacks of all threads to `fd`. Returns nullptr, or what went wrong (static text). Must not take the GIL.
using StackPrinter = const char* (*)(int fd);

struct StackDump {
  std::string text;
  std::string error;  // empty = complete
};

class StackDumper {
 public:
  // Make it on the main thread: its thread is the one that the text marks as main.
  explicit StackDumper(StackPrinter printer);
  ~StackDumper();  // waits for a printer that is still writing, at most as long as the printer does

  // Never takes longer than about `timeout` (at most 1 s).
  StackDump dump(std::chrono::milliseconds timeout = std::chrono::milliseconds(1000));

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace reft
