// The C++ exception that nothing caught, for which the runtime has called std::terminate(): what a
// thread of NCCL's watchdog or a worker of an extension ends its process with.
//
// Kept by a terminate handler, which then calls the one that was there before. It runs before
// abort() raises SIGABRT, as ordinary code: what() may allocate.
//
// Threads: any. Errors: none; an exception of another kind has no message.
#pragma once

#include <string>

namespace reft {

struct Thrown {
  std::string type;     // "c10::DistBackendError"; "" = nothing was thrown
  std::string message;  // what(), cut
};

// For good; a second call does nothing.
void keepThrown();
// The first one, if the calling process threw it.
Thrown thrown();

}  // namespace reft
