// The Python stacks of all threads of this process as text, without the GIL.
//
// This folder knows no Python: python/bindings/hang.cc provides a StackPrinter that writes the
// stacks to a descriptor of anonymous memory. StackDumper adds a line for each thread of the
// kernel's list. parseStacks() reads the result.
//
// Threads: dump() from any thread; a second dump() waits for the first within its own deadline.
// Errors:  none: StackDump::error holds the reason.
#pragma once

#include <chrono>
#include <string>

#include "intercept/base/mutex.h"

namespace reft {

// Writes the stacks of all threads to `fd` within `timeout`, and must not wait for the GIL. Returns
// the reason for its failure; "": none.
using StackPrinter = std::string (*)(int fd, std::chrono::milliseconds timeout);

struct StackDump {
  std::string text;
  std::string error;  // empty = complete
};

// "Native thread <tid> <state> <name>" for each thread of the kernel's list, one a line.
std::string nativeThreads(int pid);

class StackDumper {
 public:
  static constexpr std::chrono::milliseconds kMaxTimeout{1000};
  static constexpr size_t kMaxTextBytes = 4u << 20;

  // To be called on the main thread: the text marks the calling thread as main if it is the first
  // of the process.
  explicit StackDumper(StackPrinter printer);

  StackDump dump(std::chrono::milliseconds timeout = kMaxTimeout);

 private:
  StackPrinter printer_;
  unsigned long main_thread_ = 0;  // pthread_self() of the main thread; 0 = unknown
  Mutex mutex_;
  ConditionVariable idle_;
  bool dumping_ GUARDED_BY(mutex_) = false;
};

}  // namespace reft
