// The Python stacks of another process, read from its memory without its help: of one that is stopped, that hangs in C, or
// that has never loaded reft. Nothing is attached to it and it is not stopped.
//
// CPython 3.11, 3.12 and 3.13 on 64-bit Linux, not the free-threaded build. Native frames are not read.
//
// Threads: re-entrant. May block, where a page of the process is not in memory and its file system does not answer.
// Errors:  none: what cannot be had is said in RemoteStacks::error.
#pragma once

#include <string>

namespace reft {

struct RemoteStacks {
  std::string
      text;  // as a stack dump has it; parseStacks() reads it. Threads of the kernel's list even without frames.
  std::string version;  // "3.11"; "" if it is not known
  std::string error;    // empty = complete
};

RemoteStacks readRemoteStacks(int pid);

// {"pid", "python", "threads": [{thread, name, main, truncated, frames: [{file, function, line}]}],
//  "native_threads": [{tid, state, name}], "error"}, as in a hang report.
std::string remoteStacksJson(int pid, const RemoteStacks& stacks);

}  // namespace reft
