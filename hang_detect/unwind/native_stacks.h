// `reft-unwind PID`: native and Python frames of every thread of a process, which
// may run, stand still, hold the GIL in C, or have never loaded reft or Python.
//
// Stops one thread after the other while it copies registers, stack and Python frames
// (hang_detect/unwind/thread_copy.h), and unwinds the copies afterwards. An agent never does this
// to its ranks unasked.
//
// Threads: one call at a time. It starts a thread and joins it; when that thread ends, the kernel
//          releases any thread that is still stopped.
// Errors:  none: MergedThreads::error, MergedStack::problem.
#pragma once

#include <chrono>

#include "hang_detect/stacks/native_stack.h"
#include "hang_detect/stacks/remote_stack.h"

namespace reft {

struct NativeStacks {
  RemoteStacks python;
  MergedThreads merged;
};

// `limit` bounds the wait for threads to stop, and the unwinding; time for which the kernel blocks
// a read comes on top.
NativeStacks readNativeStacks(int pid, std::chrono::milliseconds limit = std::chrono::seconds(10));

}  // namespace reft
