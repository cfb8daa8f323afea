// Native and Python frames of a thread as one stack.
//
// Native frames of the interpreter's loop (_PyEval_EvalFrameDefault) give way to the Python frames
// that they evaluate: one run of the loop evaluates a Python function and all that it calls without
// a detour through C. How many Python frames belong to each run is known (PythonThread::runs), so
// the two lists are matched by counting. Where the counts do not agree, nothing is guessed: the
// native frames are given as they are, the Python frames after them, and that is said.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hang_detect/stacks/python_memory.h"
#include "hang_detect/stacks/remote_stack.h"
#include "hang_detect/stacks/stacks.h"

namespace reft {

struct NativeFrame {
  std::string function;  // demangled; "" = not known
  std::string object;    // file; "[vdso]"; "" = memory that is no file's
  uint64_t offset =
      0;  // of the instruction, as the object counts addresses (as addr2line takes them)
  bool evaluates = false;  // it is the interpreter's loop
};

struct NativeStack {
  std::vector<NativeFrame> frames;  // newest call first
  bool complete = false;            // down to where the thread began
  std::string problem;              // why it is not
};

struct MergedFrame {
  bool python = false;
  StackFrame line;     // if python
  NativeFrame native;  // if not
};

struct MergedStack {
  std::vector<MergedFrame> frames;  // newest call first
  bool matched = true;              // false: native frames first, then Python's
  std::string problem;
};

// `python`: of the same moment; nullopt: the thread has no Python frames.
MergedStack mergeStack(const NativeStack& native, const std::optional<PythonThread>& python);

// A thread as its process has it, with all that could be had of it.
struct MergedThread {
  int64_t tid = 0;
  std::string name, state;
  bool main = false;
  MergedStack stack;
  bool holds_gil = false;  // false, too, where that is not known
};

struct MergedThreads {
  std::vector<MergedThread> threads;
  std::string error;  // why there are none, or not all
};

// As remoteStacksJson(), and "native": {"threads": [{tid, name, state, main, holds_gil, matched,
// problem, frames: [
//   {kind: "python", file, line, function} or {kind: "native", function, object, offset}]}],
//   "error"}
std::string mergedStacksJson(int pid, const RemoteStacks& stacks, const MergedThreads& merged);

}  // namespace reft
