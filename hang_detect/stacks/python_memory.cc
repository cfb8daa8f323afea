#include "hang_detect/stacks/python_memory.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace reft {

namespace {

constexpr size_t kMaxInterpreters = 16;
constexpr size_t kMaxThreads = 1024;
constexpr size_t kMaxFrames = 512;
constexpr size_t kMaxSkipped = 4096;  // internal frames of the interpreter, per thread
constexpr size_t kMaxText = 1024;     // characters
constexpr size_t kMaxLineTable = 1u << 20;
constexpr uint64_t kMaxBytes = 64u << 20;
constexpr uint64_t kMaxReads = 500'000;
constexpr int kTries = 3;
constexpr uint8_t kOwnedByGenerator = 1;
constexpr uint8_t kOwnedByCStack = 3;
constexpr size_t kCodeUnit = 2;

// Reads within a budget, so that a walk along a damaged list that is a ring ends.
class Memory {
 public:
  explicit Memory(ReadMemory read) : read_(std::move(read)) {}

  bool bytes(uint64_t address, void* into, size_t count) {
    ++reads_;
    bytes_ += count;
    return address != 0 && address <= UINT64_MAX - count && !spent() && read_(address, into, count);
  }
  template <typename Value>
  bool value(uint64_t base, uint64_t offset, Value& into) {
    return base != 0 && base <= UINT64_MAX - offset && bytes(base + offset, &into, sizeof(into));
  }
  // Charges work on bytes that were read before.
  void count(size_t bytes) { bytes_ += bytes; }
  bool spent() const { return reads_ > kMaxReads || bytes_ > kMaxBytes; }
  void startAnew() { reads_ = bytes_ = 0; }

 private:
  ReadMemory read_;
  uint64_t reads_ = 0;
  uint64_t bytes_ = 0;
};

void appendUtf8(std::string& text, uint32_t character) {
  if (character < 0x20 || (character >= 0x7f && character < 0xa0) || character > 0x10ffff ||
      (character >= 0xd800 && character < 0xe000)) {
    text += '?';
  } else if (character < 0x80) {
    text += static_cast<char>(character);
  } else if (character < 0x800) {
    text += static_cast<char>(0xc0 | (character >> 6));
    text += static_cast<char>(0x80 | (character & 0x3f));
  } else if (character < 0x10000) {
    text += static_cast<char>(0xe0 | (character >> 12));
    text += static_cast<char>(0x80 | ((character >> 6) & 0x3f));
    text += static_cast<char>(0x80 | (character & 0x3f));
  } else {
    text += static_cast<char>(0xf0 | (character >> 18));
    text += static_cast<char>(0x80 | ((character >> 12) & 0x3f));
    text += static_cast<char>(0x80 | ((character >> 6) & 0x3f));
    text += static_cast<char>(0x80 | (character & 0x3f));
  }
}

// Line of the instruction at `unit`, 0 if it has none. A line table is a row of entries that begin
// with a byte whose highest bit is set: 4 bits of kind, 3 bits with the number of its code units
// less one. The bytes that follow depend on the kind, and none has that bit.
int64_t lineOf(const std::vector<uint8_t>& table, int64_t first_line, uint64_t unit) {
  int64_t line = first_line;
  uint64_t covered = 0;
  for (size_t at = 0; at < table.size();) {
    const uint8_t head = table[at++];
    const unsigned kind = (head >> 3) & 15;
    if (kind == 13 || kind == 14) {  // a signed number of any length, its sign in the lowest bit
      uint64_t number = 0;
      for (unsigned shift = 0; at < table.size() && shift < 63; shift += 6) {
        const uint8_t part = table[at++];
        number |= static_cast<uint64_t>(part & 63) << shift;
        if ((part & 64) == 0) {
          break;
        }
      }
      const auto magnitude = static_cast<int64_t>(std::min<uint64_t>(number >> 1, INT32_MAX));
      line += (number & 1) != 0 ? -magnitude : magnitude;
    } else if (kind >= 10 && kind <= 12) {
      line += kind - 10;
    }
    covered += (head & 7) + 1;
    if (unit < covered) {
      return kind == 15 || line < 0 ? 0 : line;
    }
    while (at < table.size() && (table[at] & 0x80) == 0) {
      ++at;
    }
  }
  return 0;
}

}  // namespace

class PythonWalker {
 public:
  PythonWalker(ReadMemory read, const PythonLayout& layout, uint64_t runtime, uint64_t code_type)
      : memory_(std::move(read)), layout_(layout), runtime_(runtime), code_type_(code_type) {}

  PythonThreads all(bool with_frames) {
    memory_.startAnew();
    states_.clear();
    PythonThreads result;
    uint64_t interpreter = 0;
    if (!memory_.value(runtime_, layout_.runtime_interpreters, interpreter) || interpreter == 0) {
      result.problem = "found no interpreter in its memory (it starts, ends, or is not Python)";
      return result;
    }
    for (size_t i = 0; interpreter != 0; ++i) {
      if (i == kMaxInterpreters) {
        result.problem = "more than " + std::to_string(kMaxInterpreters) + " interpreters";
        break;
      }
      const Gil before = gilOf(interpreter);
      const size_t first = result.threads.size();
      std::vector<uint64_t> walked;
      threadsOf(interpreter, with_frames, result, walked);
      const Gil after = gilOf(interpreter);
      for (size_t t = 0; t < walked.size(); ++t) {
        addGil(before, after, walked[t], result.threads[first + t]);
      }
      if (!memory_.value(interpreter, layout_.interpreter_next, interpreter)) {
        result.problem = "cannot read the memory of an interpreter";
        break;
      }
    }
    if (memory_.spent()) {
      result.problem = "its stacks take more memory than stacks do: damaged";
    }
    return result;
  }

  std::optional<PythonThread> one(uint64_t native_id) {
    memory_.startAnew();
    const auto at = states_.find(native_id);
    uint64_t now = 0, interpreter = 0;
    if (at == states_.end() || !memory_.value(at->second, layout_.thread_native_id, now) ||
        now != native_id || !memory_.value(at->second, layout_.thread_interpreter, interpreter)) {
      return std::nullopt;
    }
    const Gil before = gilOf(interpreter);
    PythonThread thread = threadAt(at->second, true);
    addGil(before, gilOf(interpreter), at->second, thread);
    return thread;
  }

 private:
  struct Code {
    bool known = false;  // whether it is a code object
    std::string file, name;
    int64_t first_line = 0;
    uint64_t first_traceable = 0;
    std::vector<uint8_t> lines;
  };

  struct Gil {
    uint64_t address = 0;  // 0 = unknown
    uint64_t holder = 0;   // state of a thread; 0 = none
    uint64_t switches = 0;
  };

  Gil gilOf(uint64_t interpreter) {
    Gil gil;
    if (layout_.gil_holder == PythonLayout::kAbsent) {
      return gil;
    }
    uint64_t address = runtime_ + layout_.runtime_gil;
    if (layout_.interpreter_gil != PythonLayout::kAbsent &&
        !memory_.value(interpreter, layout_.interpreter_gil, address)) {
      return gil;
    }
    int32_t locked = 0;
    if (!memory_.value(address, layout_.gil_locked, locked) ||
        !memory_.value(address, layout_.gil_switches, gil.switches) ||
        !memory_.value(address, layout_.gil_holder, gil.holder)) {
      return {};
    }
    gil.address = address;
    if (locked != 1) {
      gil.holder = 0;  // the field then names the last holder
    }
    return gil;
  }

  void addGil(const Gil& before, const Gil& after, uint64_t state, PythonThread& thread) {
    if (after.address == 0 || after.address != before.address) {
      return;
    }
    thread.gil_condition = after.address + layout_.gil_condition;
    thread.gil_switches = after.switches;
    thread.holds_gil = before.holder == state && after.holder == state;
  }

  // `walked`: receives the address of the state of each thread added.
  void threadsOf(uint64_t interpreter, bool with_frames, PythonThreads& result,
                 std::vector<uint64_t>& walked) {
    uint64_t thread = 0;
    if (!memory_.value(interpreter, layout_.interpreter_threads, thread)) {
      result.problem = "cannot read the memory of an interpreter";
      return;
    }
    while (thread != 0) {
      uint64_t owner = 0;
      if (!memory_.value(thread, layout_.thread_interpreter, owner) || owner != interpreter) {
        result.problem = "the list of threads changed, or is damaged";
        return;
      }
      if (result.threads.size() == kMaxThreads) {
        result.problem = "more than " + std::to_string(kMaxThreads) + " threads";
        return;
      }
      for (int i = 0; i < kTries; ++i) {
        PythonThread read = threadAt(thread, with_frames);
        const bool good = !read.moving && read.problem.empty();
        if (i == 0) {
          result.threads.push_back(std::move(read));
        } else {
          result.threads.back() = std::move(read);
        }
        if (good) {
          break;
        }
      }
      walked.push_back(thread);
      states_[result.threads.back().native_id] = thread;
      if (!memory_.value(thread, layout_.thread_next, thread)) {
        result.problem = "the list of threads changed, or is damaged";
        return;
      }
    }
  }

  bool topFrame(uint64_t thread, uint64_t& frame) {
    if (layout_.cframe_frame == PythonLayout::kAbsent) {
      return memory_.value(thread, layout_.thread_frame, frame);
    }
    uint64_t cframe = 0;
    return memory_.value(thread, layout_.thread_frame, cframe) &&
           memory_.value(cframe, layout_.cframe_frame, frame);
  }

  PythonThread threadAt(uint64_t thread, bool with_frames) {
    PythonThread result;
    uint64_t top = 0, instruction = 0;
    if (!memory_.value(thread, layout_.thread_id, result.id) ||
        !memory_.value(thread, layout_.thread_native_id, result.native_id) ||
        (with_frames && !topFrame(thread, top))) {
      result.problem = "cannot read the state of the thread";
      return result;
    }
    if (!with_frames) {
      return result;
    }
    if (top != 0) {
      memory_.value(top, layout_.frame_instruction, instruction);
    }
    uint64_t frame = top;
    size_t run = 0;
    bool in_run = false;
    for (size_t skipped = 0; frame != 0;) {
      if (result.frames.size() == kMaxFrames) {
        result.truncated = true;
        break;
      }
      StackFrame read;
      bool ends_run = false;
      switch (frameAt(frame, read, ends_run)) {
        case Frame::kShown:
          result.frames.push_back(std::move(read));
          ++run;
          break;
        case Frame::kInternal: ++skipped; break;
        case Frame::kBroken: result.problem = "cannot read a frame"; break;
      }
      in_run = !ends_run;
      if (ends_run) {
        result.runs.push_back(run);
        run = 0;
      }
      if (skipped > kMaxSkipped || !memory_.value(frame, layout_.frame_previous, frame)) {
        result.problem = "cannot read a frame";
      }
      if (!result.problem.empty()) {
        break;
      }
    }
    if (in_run) {
      result.runs.push_back(run);  // its oldest frames were not read
    }
    uint64_t top_now = 0, instruction_now = 0;
    if (topFrame(thread, top_now) && top_now != 0) {
      memory_.value(top_now, layout_.frame_instruction, instruction_now);
    }
    result.moving = top_now != top || instruction_now != instruction;
    return result;
  }

  enum class Frame : uint8_t { kShown, kInternal, kBroken };

  // `ends_run`: it is the oldest frame of a run of the interpreter's loop. 3.11 marks that frame;
  // newer versions put an internal one behind it.
  Frame frameAt(uint64_t frame, StackFrame& into, bool& ends_run) {
    uint64_t address = 0, instruction = 0;
    uint8_t owner = 0, entry = 0;
    if (layout_.frame_is_entry != PythonLayout::kAbsent &&
        memory_.value(frame, layout_.frame_is_entry, entry)) {
      ends_run = entry != 0;
    }
    if (!memory_.value(frame, layout_.frame_owner, owner) ||
        !memory_.value(frame, layout_.frame_code, address) ||
        !memory_.value(frame, layout_.frame_instruction, instruction)) {
      return Frame::kBroken;
    }
    if (owner == kOwnedByCStack) {
      ends_run = true;
      return Frame::kInternal;  // where C code called Python
    }
    const Code& code = codeAt(address);
    if (!code.known) {
      return Frame::kBroken;
    }
    const uint64_t begin = address + layout_.code_instructions;
    const uint64_t unit = instruction >= begin ? (instruction - begin) / kCodeUnit : 0;
    if (owner != kOwnedByGenerator && (instruction < begin || unit < code.first_traceable)) {
      return Frame::kInternal;  // not begun yet
    }
    into.file = code.file;
    into.function = code.name;
    memory_.count(code.lines.size());
    into.line = lineOf(code.lines, code.first_line, unit);
    return Frame::kShown;
  }

  const Code& codeAt(uint64_t address) {
    const auto [at, added] = codes_.try_emplace(address);
    Code& code = at->second;
    if (!added) {
      return code;
    }
    uint64_t type = 0, file = 0, name = 0, lines = 0;
    int32_t first_line = 0;
    if (!memory_.value(address, layout_.object_type, type) || type != code_type_ ||
        !memory_.value(address, layout_.code_filename, file) ||
        !memory_.value(address, layout_.code_name, name) ||
        !memory_.value(address, layout_.code_linetable, lines) ||
        !memory_.value(address, layout_.code_first_line, first_line)) {
      return code;
    }
    int32_t first_traceable = 0;
    if (layout_.code_first_traceable != PythonLayout::kAbsent &&
        memory_.value(address, layout_.code_first_traceable, first_traceable)) {
      code.first_traceable = static_cast<uint64_t>(std::max(first_traceable, 0));
    }
    code.first_line = first_line;
    code.file = textAt(file);
    code.name = textAt(name);
    int64_t size = 0;
    if (memory_.value(lines, layout_.bytes_size, size) && size > 0 &&
        size <= static_cast<int64_t>(kMaxLineTable) && !memory_.spent()) {
      code.lines.resize(static_cast<size_t>(size));
      if (!memory_.bytes(lines + layout_.bytes_data, code.lines.data(), code.lines.size())) {
        code.lines.clear();
      }
    }
    code.known = true;
    return code;
  }

  std::string textAt(uint64_t address) {
    int64_t length = 0;
    uint32_t state = 0;
    if (!memory_.value(address, layout_.unicode_length, length) ||
        !memory_.value(address, layout_.unicode_state, state) || length < 0) {
      return "???";
    }
    // interned: 2 bits, kind: 3, compact: 1, ascii: 1.
    const size_t width = (state >> 2) & 7;
    const bool compact = (state & 32) != 0;
    const bool ascii = (state & 64) != 0;
    if (!compact || (width != 1 && width != 2 && width != 4)) {
      return "???";
    }
    const auto count = std::min(static_cast<size_t>(length), kMaxText);
    std::vector<uint8_t> data(count * width);
    const uint64_t offset = ascii ? layout_.unicode_ascii_size : layout_.unicode_compact_size;
    if (address > UINT64_MAX - offset ||
        (count > 0 && !memory_.bytes(address + offset, data.data(), data.size()))) {
      return "???";
    }
    std::string text;
    for (size_t i = 0; i < count; ++i) {
      uint32_t character = 0;
      std::memcpy(&character, data.data() + i * width, width);
      appendUtf8(text, character);
    }
    if (count < static_cast<size_t>(length)) {
      text += "...";
    }
    return text;
  }

  Memory memory_;
  const PythonLayout layout_;
  uint64_t runtime_, code_type_;
  std::map<uint64_t, Code> codes_;
  std::map<uint64_t, uint64_t> states_;  // of threads, by the kernel's number
};

PythonReader::PythonReader(ReadMemory read, const PythonLayout& layout, uint64_t runtime,
                           uint64_t code_type)
    : walker_(std::make_unique<PythonWalker>(std::move(read), layout, runtime, code_type)) {}

PythonReader::~PythonReader() = default;

PythonThreads PythonReader::all(bool with_frames) {
  return walker_->all(with_frames);
}

std::optional<PythonThread> PythonReader::one(uint64_t native_id) {
  return walker_->one(native_id);
}

PythonThreads readPythonThreads(const ReadMemory& read, const PythonLayout& layout,
                                uint64_t runtime, uint64_t code_type) {
  return PythonReader(read, layout, runtime, code_type).all();
}

}  // namespace reft
