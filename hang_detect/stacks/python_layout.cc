#include "hang_detect/stacks/python_layout.h"

#include <algorithm>
#include <cstring>

namespace reft {

namespace {

constexpr uint64_t kMaxOffset = 1u << 20;

}  // namespace

const PythonLayout* pythonLayout(int minor) {
  static const PythonLayout k311{
      .runtime_interpreters = 40,
      .interpreter_next = 0,
      .interpreter_threads = 16,
      .thread_next = 8,
      .thread_interpreter = 16,
      .thread_id = 152,
      .thread_native_id = 160,
      .thread_frame = 56,
      .cframe_frame = 8,
      .frame_code = 32,
      .frame_previous = 48,
      .frame_instruction = 56,
      .frame_owner = 69,
      .frame_is_entry = 68,
      .code_filename = 112,
      .code_name = 120,
      .code_linetable = 136,
      .code_first_line = 72,
      .code_first_traceable = 168,
      .code_instructions = 184,
      .unicode_length = 16,
      .unicode_state = 32,
      .unicode_ascii_size = 48,
      .unicode_compact_size = 72,
      .bytes_size = 16,
      .bytes_data = 32,
      .object_type = 8,
      .runtime_gil = 360,
      .interpreter_gil = PythonLayout::kAbsent,
      .gil_holder = 8,
      .gil_locked = 16,
      .gil_switches = 24,
      .gil_condition = 32,
  };
  static const PythonLayout k312{
      .runtime_interpreters = 40,
      .interpreter_next = 0,
      .interpreter_threads = 72,
      .thread_next = 8,
      .thread_interpreter = 16,
      .thread_id = 136,
      .thread_native_id = 144,
      .thread_frame = 56,
      .cframe_frame = 0,
      .frame_code = 0,
      .frame_previous = 8,
      .frame_instruction = 56,
      .frame_owner = 70,
      .frame_is_entry = PythonLayout::kAbsent,
      .code_filename = 112,
      .code_name = 120,
      .code_linetable = 136,
      .code_first_line = 68,
      .code_first_traceable = 176,
      .code_instructions = 192,
      .unicode_length = 16,
      .unicode_state = 32,
      .unicode_ascii_size = 40,
      .unicode_compact_size = 56,
      .bytes_size = 16,
      .bytes_data = 32,
      .object_type = 8,
      .runtime_gil = PythonLayout::kAbsent,
      .interpreter_gil = 384,
      .gil_holder = 8,
      .gil_locked = 16,
      .gil_switches = 24,
      .gil_condition = 32,
  };
  return minor == 11 ? &k311 : minor == 12 ? &k312 : nullptr;
}

const PythonLayout& undescribedLayout() {
  static const PythonLayout k313{
      .gil_holder = 8,
      .gil_locked = 16,
      .gil_switches = 24,
      .gil_condition = 32,
  };
  return k313;
}

std::optional<PythonLayout> readPythonLayout(const ReadMemory& read, uint64_t runtime,
                                             std::string& problem) {
  // The order of the fields of _Py_DebugOffsets, after the cookie: all are 64 bits.
  // clang-format off
  enum Field : size_t {
    kVersion, kFreeThreaded,
    kRuntimeSize, kRuntimeFinalizing, kRuntimeInterpreters,
    kInterpreterSize, kInterpreterId, kInterpreterNext, kInterpreterThreads, kInterpreterGc, kInterpreterModules,
    kInterpreterSysdict, kInterpreterBuiltins, kInterpreterGil, kInterpreterGilState, kInterpreterGilEnabled,
    kInterpreterGilLocked, kInterpreterGilHolder,
    kThreadSize, kThreadPrev, kThreadNext, kThreadInterpreter, kThreadFrame, kThreadId, kThreadNativeId, kThreadStack,
    kThreadStatus,
    kFrameSize, kFramePrevious, kFrameExecutable, kFrameInstruction, kFrameLocals, kFrameOwner,
    kCodeSize, kCodeFilename, kCodeName, kCodeQualname, kCodeLinetable, kCodeFirstLine, kCodeArgcount, kCodeLocalNames,
    kCodeLocalKinds, kCodeInstructions,
    kObjectSize, kObjectType,
    kTypeSize, kTypeName, kTypeRepr, kTypeFlags,
    kTupleSize, kTupleItem, kTupleCount,
    kListSize, kListItem, kListCount,
    kDictSize, kDictKeys, kDictValues,
    kFloatSize, kFloatValue,
    kLongSize, kLongTag, kLongDigit,
    kBytesSize, kBytesCount, kBytesData,
    kUnicodeSize, kUnicodeState, kUnicodeLength, kUnicodeAsciiSize,
    kFields
  };
  // clang-format on
  struct {
    char cookie[8];
    uint64_t field[kFields];
  } offsets;
  if (!read(runtime, &offsets, sizeof(offsets)) ||
      std::memcmp(offsets.cookie, "xdebugpy", 8) != 0) {
    problem = "its interpreter does not describe its layout";
    return std::nullopt;
  }
  const auto& field = offsets.field;
  if (field[kVersion] >> 16 != 0x030d) {
    problem = "its interpreter describes the layout of a version other than 3.13";
    return std::nullopt;
  }
  if (field[kFreeThreaded] != 0) {
    problem = "its interpreter is a free-threaded build, which is not supported";
    return std::nullopt;
  }
  if (std::any_of(field + kRuntimeSize, field + kFields,
                  [](uint64_t offset) { return offset > kMaxOffset; })) {
    problem = "its interpreter's description of its layout is damaged";
    return std::nullopt;
  }
  // The description has these fields for the GIL inside the interpreter's own state.
  const PythonLayout& gil = undescribedLayout();
  const bool gil_as_known =
      field[kInterpreterGilHolder] == field[kInterpreterGilState] + gil.gil_holder &&
      field[kInterpreterGilLocked] == field[kInterpreterGilState] + gil.gil_locked;
  const auto ifKnown = [gil_as_known](uint64_t offset) {
    return gil_as_known ? offset : PythonLayout::kAbsent;
  };
  return PythonLayout{
      .runtime_interpreters = field[kRuntimeInterpreters],
      .interpreter_next = field[kInterpreterNext],
      .interpreter_threads = field[kInterpreterThreads],
      .thread_next = field[kThreadNext],
      .thread_interpreter = field[kThreadInterpreter],
      .thread_id = field[kThreadId],
      .thread_native_id = field[kThreadNativeId],
      .thread_frame = field[kThreadFrame],
      .cframe_frame = PythonLayout::kAbsent,
      .frame_code = field[kFrameExecutable],
      .frame_previous = field[kFramePrevious],
      .frame_instruction = field[kFrameInstruction],
      .frame_owner = field[kFrameOwner],
      .frame_is_entry = PythonLayout::kAbsent,
      .code_filename = field[kCodeFilename],
      .code_name = field[kCodeName],
      .code_linetable = field[kCodeLinetable],
      .code_first_line = field[kCodeFirstLine],
      .code_first_traceable = PythonLayout::kAbsent,
      .code_instructions = field[kCodeInstructions],
      .unicode_length = field[kUnicodeLength],
      .unicode_state = field[kUnicodeState],
      .unicode_ascii_size = field[kUnicodeAsciiSize],
      .unicode_compact_size =
          field[kUnicodeAsciiSize] + 2 * sizeof(uint64_t),  // and its UTF-8 form: length, pointer
      .bytes_size = field[kBytesCount],
      .bytes_data = field[kBytesData],
      .object_type = field[kObjectType],
      .runtime_gil = PythonLayout::kAbsent,
      .interpreter_gil = ifKnown(field[kInterpreterGil]),
      .gil_holder = ifKnown(gil.gil_holder),
      .gil_locked = ifKnown(gil.gil_locked),
      .gil_switches = ifKnown(gil.gil_switches),
      .gil_condition = ifKnown(gil.gil_condition),
  };
}

std::optional<PythonLayout> findPythonLayout(int minor, const ReadMemory& read, uint64_t runtime,
                                             std::string& problem) {
  if (const PythonLayout* known = pythonLayout(minor)) {
    return *known;
  }
  if (minor == 13) {
    return readPythonLayout(read, runtime, problem);
  }
  problem = "CPython 3." + std::to_string(minor) + " is not supported: 3.11 to 3.13 are";
  return std::nullopt;
}

}  // namespace reft
