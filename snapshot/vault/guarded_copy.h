// Copies memory of this process that may vanish meanwhile, by loads.
//
// A load of a page that is not there raises SIGSEGV or SIGBUS. reft's handler knows the one
// instruction that loads, and continues behind it: the copy ends there. It also puts pages of zeros
// where the disk under a vault has lost some (mapping.h). Every other signal goes on to the handler
// that was there before, or ends the process as before. A library that sets a
// handler of its own later has the signal for itself: then, where a thread blocks the signal, and
// on processors that copy single bytes with that instruction, isGuarded() says no, and
// live_reader.h lets the kernel copy.
//
// Threads: all; the handler touches the thread that faulted alone. Errors: none.
#pragma once

#include <cstddef>

namespace reft {

// Whether a fault of guardedCopy() on this thread would end that copy alone. To be asked before
// each copy of some KiB: it takes three system calls that only look. Sets the handlers at the first
// call.
bool isGuarded();

// Returns the bytes that were copied, up to the first that could not be loaded. Only if
// isGuarded(). `to` is there, and does not overlap.
size_t guardedCopy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace reft
