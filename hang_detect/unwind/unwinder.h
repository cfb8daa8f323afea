// Native frames from a copy of a thread's registers and stack; the process may run again, stand
// still, or have ended.
//
// libunwind does it (REFT_WITH_UNWIND), with the call frame information that the process's own
// files brought into its memory. Without libunwind there are no frames, and builtWithUnwinder()
// says so.
//
// Threads: an Unwinder belongs to one thread. May block as ProcessMemory does.
// Errors:  none: NativeStack::problem. Damaged memory makes a stack shorter, or its unwinding slow:
// callers bound the time.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hang_detect/stacks/native_stack.h"
#include "hang_detect/unwind/thread_copy.h"

namespace reft {

bool builtWithUnwinder();

class Unwinder {
 public:
  // `eval_function`: address of _PyEval_EvalFrameDefault; 0 = none.
  Unwinder(int pid, std::vector<MappedRange> maps, uint64_t eval_function);
  ~Unwinder();
  Unwinder(const Unwinder&) = delete;
  Unwinder& operator=(const Unwinder&) = delete;

  // Stacks of these threads, in their order; frames have names.
  std::vector<NativeStack> unwind(const std::vector<CopiedThread>& threads,
                                  std::chrono::steady_clock::time_point deadline);

 private:
  class Space;
  std::unique_ptr<Space> space_;
};

}  // namespace reft
