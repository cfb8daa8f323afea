// Python stacks from the memory of another process, which may run, stand still, or hold anything.
//
// CPython 3.13 says in its own memory where its fields are; for 3.11 and 3.12, which do not, the
// places are in a table here, which a test compares with the headers of those versions (this folder
// knows no Python). Who holds the GIL is read the same way.
//
// Threads: free functions, re-entrant.
// Errors:  none: whatever the memory holds, walking it ends, after a bounded number of bytes; what
// it could not follow is said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hang_detect/stacks/stacks.h"

namespace reft {

// Reads exactly `bytes` at `address`; false if that is not possible.
using ReadMemory = std::function<bool(uint64_t address, void* into, size_t bytes)>;

// Offsets of fields, in bytes; of sizes, the size. kAbsent: this version has no such field.
#define REFT_PYTHON_LAYOUT(X) \
  X(runtime_interpreters)     \
  X(interpreter_next)         \
  X(interpreter_threads)      \
  X(thread_next)              \
  X(thread_interpreter)       \
  X(thread_id)                \
  X(thread_native_id)         \
  X(thread_frame)             \
  X(cframe_frame)             \
  X(frame_code)               \
  X(frame_previous)           \
  X(frame_instruction)        \
  X(frame_owner)              \
  X(frame_is_entry)           \
  X(code_filename)            \
  X(code_name)                \
  X(code_linetable)           \
  X(code_first_line)          \
  X(code_first_traceable)     \
  X(code_instructions)        \
  X(unicode_length)           \
  X(unicode_state)            \
  X(unicode_ascii_size)       \
  X(unicode_compact_size)     \
  X(bytes_size)               \
  X(bytes_data)               \
  X(object_type)              \
  X(runtime_gil)              \
  X(interpreter_gil)          \
  X(gil_holder)               \
  X(gil_locked)               \
  X(gil_switches)             \
  X(gil_condition)

struct PythonLayout {
  static constexpr uint64_t kAbsent = UINT64_MAX;
#define REFT_PYTHON_FIELD(name) uint64_t name = kAbsent;
  REFT_PYTHON_LAYOUT(REFT_PYTHON_FIELD)
#undef REFT_PYTHON_FIELD
};

// Of CPython 3.`minor`; nullptr if it is not in the table.
const PythonLayout* pythonLayout(int minor);

// Of CPython 3.13: what its description of itself leaves out of the GIL, and what it has to say of
// the rest. Nothing else.
const PythonLayout& undescribedLayout();

// What the interpreter at `runtime` (symbol _PyRuntime) says about itself, 3.13. nullopt and
// `problem` if it says nothing that makes sense.
std::optional<PythonLayout> readPythonLayout(const ReadMemory& read, uint64_t runtime,
                                             std::string& problem);

// By whichever of the two ways CPython 3.`minor` has.
std::optional<PythonLayout> findPythonLayout(int minor, const ReadMemory& read, uint64_t runtime,
                                             std::string& problem);

struct PythonThread {
  uint64_t id = 0;         // pthread_t
  uint64_t native_id = 0;  // as the kernel numbers it
  bool truncated = false;  // more frames than are read
  bool moving = false;     // it went on while it was read, so the frames may be of different times
  bool holds_gil =
      false;  // of its interpreter: before and after the walk. False, too, where that is not known.
  uint64_t gil_condition = 0;  // address at which those sleep who wait for that GIL; 0: not known
  uint64_t gil_switches = 0;   // how often it went from one thread to another
  std::string problem;         // why frames are missing
  std::vector<StackFrame> frames;  // most recent call first
  // How many of these frames each run of the interpreter's loop (_PyEval_EvalFrameDefault)
  // evaluates, newest first: calls from Python to Python need no new one. A run may have none,
  // where its frame has not begun.
  std::vector<size_t> runs;
};

struct PythonThreads {
  std::vector<PythonThread> threads;
  std::string problem;  // why threads are missing
};

class PythonWalker;

// Reads threads of one process again and again; what it has learnt of their code it keeps.
class PythonReader {
 public:
  // `code_type`: address of PyCode_Type; what a frame holds must be of that type, or it is left
  // out.
  PythonReader(ReadMemory read, const PythonLayout& layout, uint64_t runtime, uint64_t code_type);
  ~PythonReader();
  PythonReader(const PythonReader&) = delete;
  PythonReader& operator=(const PythonReader&) = delete;

  // Without frames: who there is, and who holds the GIL.
  PythonThreads all(bool with_frames = true);
  // One of those that all() has found, by the kernel's number; nullopt: it is none of them, or no
  // more.
  std::optional<PythonThread> one(uint64_t native_id);

 private:
  std::unique_ptr<PythonWalker> walker_;
};

// all() of a new PythonReader.
PythonThreads readPythonThreads(const ReadMemory& read, const PythonLayout& layout,
                                uint64_t runtime, uint64_t code_type);

}  // namespace reft
