// Native and Python frames of a thread as one stack.
//
// The Python frames replace the native frames of the interpreter's loop (_PyEval_EvalFrameDefault)
// that evaluate them: one run of the loop evaluates a Python function and all that it calls without
// a detour through C. PythonThread::runs has the number of Python frames of each run, so that
// mergeStack() matches the two lists by counting. Where the counts disagree it does not guess:
// MergedStack::matched is false, and the Python frames follow the native ones.
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
  std::string function;    // demangled; "" = unknown
  std::string object;      // file; "[vdso]"; "" = memory of no file
  uint64_t offset = 0;     // address of the instruction inside the object, as addr2line takes it
  bool evaluates = false;  // the interpreter's loop
};

struct NativeStack {
  std::vector<NativeFrame> frames;  // newest call first
  bool complete = false;            // down to the start of the thread
  std::string problem;              // reason for an incomplete stack
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

// `python`: the thread's Python frames at the same moment; nullopt: none.
MergedStack mergeStack(const NativeStack& native, const std::optional<PythonThread>& python);

// A thread of the process with its stack.
struct MergedThread {
  int64_t tid = 0;
  std::string name, state;
  bool main = false;
  MergedStack stack;
  bool holds_gil = false;  // false where unknown, too
};

struct MergedThreads {
  std::vector<MergedThread> threads;
  std::string error;  // reason for missing threads
};

// As remoteStacksJson(), and "native": {"threads": [{tid, name, state, main, holds_gil, matched,
// problem, frames: [
//   {kind: "python", file, line, function} or {kind: "native", function, object, offset}]}],
//   "error"}
std::string mergedStacksJson(int pid, const RemoteStacks& stacks, const MergedThreads& merged);

}  // namespace reft
