// All threads' Python stacks of this process as text, without the GIL.
//
// This folder knows no Python: a StackPrinter, given by python/bindings/hang.cc, writes the stacks
// to a descriptor of anonymous memory; lines about the threads as the kernel sees them are added.
// parseStacks() reads the result.
//
// Threads: dump() from any thread; a second dump() waits for the first within its own deadline.
// Errors:  none: what went wrong is in StackDump::error.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace reft {

// Writes the stacks of all threads to `fd` and returns within `timeout`: nullptr, or what went
// wrong (static text). Must not wait for the GIL.
using StackPrinter = const char* (*)(int fd, std::chrono::milliseconds timeout);

struct StackDump {
  std::string text;
  std::string error;  // empty = complete
};

// A line for each thread of the process as the kernel sees it: "Native thread <tid> <state>
// <name>".
std::string nativeThreads(int pid);

class StackDumper {
 public:
  static constexpr std::chrono::milliseconds kMaxTimeout{1000};
  static constexpr size_t kMaxTextBytes = 4u << 20;

  // Make it on the main thread: the text marks the maker's thread as main (only if it is the
  // process's first thread).
  explicit StackDumper(StackPrinter printer);

  StackDump dump(std::chrono::milliseconds timeout = kMaxTimeout);

 private:
  StackPrinter printer_;
  unsigned long main_thread_ = 0;  // pthread_self() of the main thread; 0 = unknown
  std::mutex mutex_;
  std::condition_variable free_;
  bool dumping_ = false;
};

}  // namespace reft
