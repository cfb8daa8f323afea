// Where CPython keeps the fields that lead to stacks and to the holder of the GIL.
//
// CPython 3.13 describes its own layout in memory. For 3.11 and 3.12 a table here has the offsets,
// which a test compares with the headers of those versions (this folder knows no Python).
//
// Threads: free functions, re-entrant.
// Errors:  none: an unknown or damaged layout is nullptr or nullopt, and `problem` has the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace reft {

// Reads exactly `bytes` at `address`; false on failure.
using ReadMemory = std::function<bool(uint64_t address, void* into, size_t bytes)>;

// Offsets of fields in bytes, and sizes of objects. kAbsent: this version lacks the field.
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

// The layout of CPython 3.`minor`; nullptr if the table lacks it.
const PythonLayout* pythonLayout(int minor);

// CPython 3.13: the fields of the GIL that its own description leaves out, and the values that the
// description must have elsewhere.
const PythonLayout& undescribedLayout();

// Reads the description that CPython 3.13 keeps at `runtime` (symbol _PyRuntime). nullopt and
// `problem` if it makes no sense.
std::optional<PythonLayout> readPythonLayout(const ReadMemory& read, uint64_t runtime,
                                             std::string& problem);

// pythonLayout() or readPythonLayout(), whichever fits CPython 3.`minor`.
std::optional<PythonLayout> findPythonLayout(int minor, const ReadMemory& read, uint64_t runtime,
                                             std::string& problem);

}  // namespace reft
