// `reft-agent --stack PID --native`: native and Python frames of every thread of a process, which
// may run, stand still, hold the GIL in C, or have never loaded reft or Python.
//
// Thread by thread: it is held, its registers, stack and Python frames are copied, it is let go
// (hang_detect/unwind/thread_copy.h). All else comes after. An agent never does this to its ranks
// by itself.
//
// Threads: one call at a time. It starts a thread and joins it: what that has not let go, the
// kernel does. Errors:  none: MergedThreads::error, MergedStack::problem.
#pragma once

#include <chrono>

#include "hang_detect/stacks/native_stack.h"
#include "hang_detect/stacks/remote_stack.h"

namespace reft {

struct NativeStacks {
  RemoteStacks python;
  MergedThreads merged;
};

// `limit` bounds the time for which threads are waited for, and after which no more frames are
// looked for; what the kernel makes a read wait for comes on top.
NativeStacks readNativeStacks(int pid, std::chrono::milliseconds limit = std::chrono::seconds(10));

}  // namespace reft
