// The Python stacks of a process, read from its memory without its help. The process may be
// stopped, hang in C, or never have loaded reft. The reader neither attaches to it nor stops it. It
// may be the reader's own process: its other threads may run meanwhile, and what they free is an
// unreadable page here, not a signal.
//
// CPython 3.11, 3.12 and 3.13 on 64-bit Linux, without the free-threaded build.
// hang_detect/unwind/native_stacks.h adds native frames.
//
// Threads: re-entrant. May block if a page of the process is not in memory and its file system does
//          not answer.
// Errors:  none: RemoteStacks::error holds the reason for missing stacks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "hang_detect/stacks/process_memory.h"
#include "hang_detect/stacks/python_memory.h"

namespace reft {

struct RemoteStacks {
  std::string text;     // as StackDump::text; parseStacks() reads it
  std::string version;  // "3.11"; "" = unknown
  std::string error;    // empty = complete
};

RemoteStacks readRemoteStacks(int pid);

// Where a process has its interpreter, CPython 3.`minor`.
struct Interpreter {
  uint64_t runtime = 0;    // address of _PyRuntime
  uint64_t code_type = 0;  // of PyCode_Type
  uint64_t eval_function = 0;
  int minor = 0;
};

// Of this process, whose interpreter the caller knows. The text has no native threads.
RemoteStacks readOwnStacks(const Interpreter& interpreter);

// The same, for callers that then stop single threads and read them again.
class RemotePython {
 public:
  explicit RemotePython(int pid);                         // reads all threads
  RemotePython(int pid, const Interpreter& interpreter);  // without native threads
  ~RemotePython();
  RemotePython(const RemotePython&) = delete;
  RemotePython& operator=(const RemotePython&) = delete;

  const RemoteStacks& stacks() const { return stacks_; }
  // `native_id`: the thread's own thread id, which differs from the reader's view in a container.
  // nullopt: not a Python thread.
  std::optional<PythonThread> thread(uint64_t native_id);
  // Address of _PyEval_EvalFrameDefault; 0 = unknown.
  uint64_t evalFunction() const { return eval_function_; }

 private:
  void readFrom(int pid);
  void readThreads(int pid, const Interpreter& interpreter);

  RemoteStacks stacks_;
  uint64_t eval_function_ = 0;
  ProcessMemory memory_;
  std::unique_ptr<PythonReader> reader_;
};

// The thread id of a thread in its own PID namespace.
uint64_t ownNumber(int pid, int tid);

// {"pid", "python", "threads": [{thread, name, main, truncated, holds_gil, awaits_gil_of, place,
// frames: [{file, function, line}]}],
//  "native_threads": [{tid, state, name}], "error"}, as in a hang report.
std::string remoteStacksJson(int pid, const RemoteStacks& stacks);

}  // namespace reft
