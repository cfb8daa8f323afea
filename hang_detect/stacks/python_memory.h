// Python stacks from the memory of another process, which may run, stand still, or hold any bytes.
//
// CPython 3.13 describes its own layout in memory. For 3.11 and 3.12 a table here has the offsets
// of the fields, which a test compares with the headers of those versions (this folder knows no
// Python). The holder of the GIL is read the same way.
//
// Threads: free functions, re-entrant.
// Errors:  none: walking any memory ends after a bounded number of bytes. `problem` holds the
// reason
//          for missing threads or frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hang_detect/stacks/python_layout.h"
#include "hang_detect/stacks/stacks.h"

namespace reft {

struct PythonThread {
  uint64_t id = 0;         // pthread_t
  uint64_t native_id = 0;  // the kernel's thread id
  bool truncated = false;  // older frames were not read
  bool moving = false;     // it ran during the read, so the frames may be of different times
  bool holds_gil =
      false;  // of its interpreter, before and after the walk; false where unknown, too
  uint64_t gil_condition = 0;      // address on which waiters for that GIL sleep; 0 = unknown
  uint64_t gil_switches = 0;       // times that the GIL went from one thread to another
  std::string problem;             // reason for missing frames
  std::vector<StackFrame> frames;  // most recent call first
  // Number of these frames that each run of the interpreter's loop (_PyEval_EvalFrameDefault)
  // evaluates, newest first: a call from Python to Python starts no new run. 0 for a run whose
  // frame has not begun.
  std::vector<size_t> runs;
};

struct PythonThreads {
  std::vector<PythonThread> threads;
  std::string problem;  // reason for missing threads
};

class PythonWalker;

// Reads the threads of one process repeatedly, and caches what it learns about their code.
class PythonReader {
 public:
  // `code_type`: address of PyCode_Type; frames whose code is of another type are left out.
  PythonReader(ReadMemory read, const PythonLayout& layout, uint64_t runtime, uint64_t code_type);
  ~PythonReader();
  PythonReader(const PythonReader&) = delete;
  PythonReader& operator=(const PythonReader&) = delete;

  // All threads; without frames: ids and the holder of the GIL only.
  PythonThreads all(bool with_frames = true);
  // One thread that all() has found, by the kernel's thread id; nullopt if there is none such any
  // more.
  std::optional<PythonThread> one(uint64_t native_id);

 private:
  std::unique_ptr<PythonWalker> walker_;
};

// all() of a new PythonReader.
PythonThreads readPythonThreads(const ReadMemory& read, const PythonLayout& layout,
                                uint64_t runtime, uint64_t code_type);

}  // namespace reft
