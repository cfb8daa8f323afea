// The Python stacks of another process, read from its memory without its help: of one that is
// stopped, that hangs in C, or that has never loaded reft. Nothing is attached to it and it is not
// stopped.
//
// CPython 3.11, 3.12 and 3.13 on 64-bit Linux, not the free-threaded build. Native frames:
// hang_detect/unwind/native_stacks.h.
//
// Threads: re-entrant. May block, where a page of the process is not in memory and its file system
// does not answer. Errors:  none: what cannot be had is said in RemoteStacks::error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "hang_detect/stacks/process_memory.h"
#include "hang_detect/stacks/python_memory.h"

namespace reft {

struct RemoteStacks {
  std::string text;  // as a stack dump has it; parseStacks() reads it. Threads of the kernel's list
                     // even without frames.
  std::string version;  // "3.11"; "" if it is not known
  std::string error;    // empty = complete
};

RemoteStacks readRemoteStacks(int pid);

// The same, for those who then read single threads again, which they hold.
class RemotePython {
 public:
  explicit RemotePython(int pid);  // reads all
  ~RemotePython();
  RemotePython(const RemotePython&) = delete;
  RemotePython& operator=(const RemotePython&) = delete;

  const RemoteStacks& stacks() const { return stacks_; }
  // `native_id`: the number by which the thread knows itself; in a container it is another one.
  // nullopt: it is none of Python's.
  std::optional<PythonThread> thread(uint64_t native_id);
  // Address of _PyEval_EvalFrameDefault; 0: not known.
  uint64_t evalFunction() const { return eval_function_; }

 private:
  void readFrom(int pid);

  RemoteStacks stacks_;
  uint64_t eval_function_ = 0;
  ProcessMemory memory_;
  std::unique_ptr<PythonReader> reader_;
};

// The number by which a thread of a process knows itself.
uint64_t ownNumber(int pid, int tid);

// {"pid", "python", "threads": [{thread, name, main, truncated, holds_gil, awaits_gil_of, frames:
// [{file, function, line}]}],
//  "native_threads": [{tid, state, name}], "error"}, as in a hang report.
std::string remoteStacksJson(int pid, const RemoteStacks& stacks);

}  // namespace reft
