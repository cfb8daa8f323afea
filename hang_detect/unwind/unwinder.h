// Unwinds native frames from a copy of a thread's registers and stack, while the process runs, is
// stopped, or has ended.
//
// libunwind does the work (REFT_WITH_UNWIND), with the call frame information in the files that the
// process has mapped. Without libunwind, builtWithUnwinder() returns false and stacks are empty.
//
// Why not elfutils' libdwfl? Its memory callbacks are public, while this file needs a symbol that
// libunwind exports without a header. But reft-unwind links it statically, to run on hosts
// without that library. libunwind's licence (MIT) asks only for a copyright notice; libdw's
// (LGPLv3+ or GPLv2+) obliges every distributor of such a binary to make it relinkable. libdwfl
// also needs an ELF file for each module, and custom callbacks for files that are deleted or in
// another mount namespace, so most of this code would stay. We have not tried it.
//
// Threads: an Unwinder belongs to one thread. May block, as ProcessMemory does.
// Errors:  reported in NativeStack::problem. Damaged memory shortens a stack or slows its
//          unwinding, so callers set a deadline.
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

  // Returns the stack of each thread, in order, with function names.
  std::vector<NativeStack> unwind(const std::vector<CopiedThread>& threads,
                                  std::chrono::steady_clock::time_point deadline);

 private:
  class Space;
  std::unique_ptr<Space> space_;
};

}  // namespace reft
