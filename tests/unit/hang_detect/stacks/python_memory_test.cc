#include "hang_detect/stacks/python_memory.h"

#include <algorithm>
#include <cstring>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hang_detect/stacks/stacks.h"

namespace reft {
namespace python_memory_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kBase = 0x10000;

// The memory of a process whose objects are laid out as CPython 3.11 does it.
class FakePython {
  uint64_t end_ = kBase;  // before what is made of it
  uint64_t newest_ = 0;

 public:
  const PythonLayout& layout = *pythonLayout(11);
  std::vector<uint8_t> bytes = std::vector<uint8_t>(1 << 16);
  const uint64_t runtime = make(layout.runtime_gil + 128), interpreter = make(64),
                 code_type = make(8);
  const uint64_t gil = runtime + layout.runtime_gil;

  FakePython() {
    set(runtime + layout.runtime_interpreters, interpreter);
    set(interpreter + layout.interpreter_next, uint64_t{0});
  }

  uint64_t make(uint64_t size) {
    const uint64_t at = end_;
    end_ += (size + 15) / 16 * 16;
    return at;
  }
  template <typename Value>
  void set(uint64_t address, Value value) {
    std::memcpy(bytes.data() + (address - kBase), &value, sizeof(value));
  }

  template <typename Character>
  uint64_t text(const std::vector<Character>& characters, bool ascii) {
    const uint64_t at = make(layout.unicode_compact_size + characters.size() * sizeof(Character));
    set(at + layout.unicode_length, characters.size());
    set(at + layout.unicode_state,
        static_cast<uint32_t>(sizeof(Character) << 2 | 32 | (ascii ? 64 : 0)));
    const uint64_t data = at + (ascii ? layout.unicode_ascii_size : layout.unicode_compact_size);
    std::memcpy(bytes.data() + (data - kBase), characters.data(),
                characters.size() * sizeof(Character));
    return at;
  }
  uint64_t text(std::string_view ascii) {
    return text(std::vector<uint8_t>(ascii.begin(), ascii.end()), true);
  }

  uint64_t code(uint64_t file, uint64_t name, int32_t first_line,
                const std::vector<uint8_t>& lines) {
    const uint64_t at = make(layout.code_instructions + 64);
    const uint64_t table = make(layout.bytes_data + lines.size());
    set(table + layout.bytes_size, lines.size());
    std::copy(lines.begin(), lines.end(),
              bytes.begin() + static_cast<ptrdiff_t>(table + layout.bytes_data - kBase));
    set(at + layout.object_type, code_type);
    set(at + layout.code_filename, file);
    set(at + layout.code_name, name);
    set(at + layout.code_linetable, table);
    set(at + layout.code_first_line, first_line);
    return at;
  }
  uint64_t frame(uint64_t code, uint64_t unit, uint64_t previous) {
    const uint64_t at = make(80);
    set(at + layout.frame_code, code);
    set(at + layout.frame_instruction, code + layout.code_instructions + 2 * unit);
    set(at + layout.frame_previous, previous);
    return at;
  }
  void takeGil(uint64_t thread, int32_t locked = 1) {
    set(gil + layout.gil_holder, thread);
    set(gil + layout.gil_locked, locked);
  }
  uint64_t thread(uint64_t id, uint64_t frame) {
    const uint64_t at = make(256), cframe = make(16);
    set(cframe + layout.cframe_frame, frame);
    set(at + layout.thread_interpreter, interpreter);
    set(at + layout.thread_frame, cframe);
    set(at + layout.thread_id, id);
    set(at + layout.thread_native_id, id + 1000);
    set(at + layout.thread_next, newest_);
    set(interpreter + layout.interpreter_threads, at);
    return newest_ = at;
  }

  ReadMemory reader() const {
    return [this](uint64_t address, void* into, size_t count) {
      if (address < kBase || address - kBase > bytes.size() ||
          count > bytes.size() - (address - kBase)) {
        return false;
      }
      std::memcpy(into, bytes.data() + (address - kBase), count);
      return true;
    };
  }
  PythonThreads read() const { return readPythonThreads(reader(), layout, runtime, code_type); }
};

// Entries of a line table.
uint8_t head(unsigned kind, unsigned units) {
  return static_cast<uint8_t>(0x80 | kind << 3 | (units - 1));
}

TEST(PythonMemory, ReadsThreadsAndTheirFramesNewestFirst) {
  FakePython python;
  const uint64_t file = python.text("/home/u/train.py");
  // Unit 0: line 10; units 1, 2: line 12 (kind 12: one line of three, so 2 more); units 3 to 5:
  // none; unit 6: 12 - 5.
  const uint64_t code =
      python.code(file, python.text("load"), 10,
                  {head(10, 1), 3, 9, head(12, 2), 1, 2, head(15, 3), head(13, 1), 5 << 1 | 1});
  const uint64_t outer = python.frame(code, 6, 0);
  const uint64_t lineless = python.frame(code, 4, outer);
  python.thread(7, python.frame(code, 0, python.frame(code, 2, lineless)));
  python.thread(8, 0);
  const PythonThreads read = python.read();
  EXPECT_EQ(read.problem, "");
  ASSERT_THAT(read.threads, SizeIs(2));
  EXPECT_THAT(read.threads[0].frames, IsEmpty());
  EXPECT_EQ(read.threads[1].native_id, 1007u);
  EXPECT_FALSE(read.threads[1].moving);
  std::vector<int64_t> lines;
  for (const StackFrame& frame : read.threads[1].frames) {
    EXPECT_EQ(frame.file + ":" + frame.function, "/home/u/train.py:load");
    lines.push_back(frame.line);
  }
  EXPECT_EQ(lines, (std::vector<int64_t>{10, 12, 0, 7}));
}

TEST(PythonMemory, SaysHowManyFramesEachRunOfTheInterpretersLoopEvaluates) {
  FakePython python;
  const uint64_t code = python.code(python.text("f"), python.text("g"), 5, {head(10, 1), 0, 0});
  const auto entry = [&](uint64_t frame) {
    python.set(frame + python.layout.frame_is_entry, uint8_t{1});
    return frame;
  };
  const uint64_t module = entry(python.frame(code, 0, 0));
  const uint64_t called_from_c = entry(python.frame(code, 0, module));
  python.thread(7, python.frame(code, 0, python.frame(code, 0, called_from_c)));
  python.thread(8, python.frame(code, 0, 0));  // its oldest frame is missing
  PythonReader reader(python.reader(), python.layout, python.runtime, python.code_type);
  const PythonThreads all = reader.all();
  ASSERT_THAT(all.threads, SizeIs(2));
  EXPECT_EQ(all.threads[1].runs, (std::vector<size_t>{3, 1}));
  EXPECT_EQ(all.threads[0].runs, std::vector<size_t>{1});
  const auto one = reader.one(1007);
  ASSERT_TRUE(one);
  EXPECT_EQ(one->runs, (std::vector<size_t>{3, 1}));
  EXPECT_THAT(one->frames, SizeIs(4));
  EXPECT_FALSE(reader.one(1009));
}

TEST(PythonMemory, ALineMayBeFarFromTheOneBefore) {
  FakePython python;
  // 1000 << 1, six bits at a time, the lowest first.
  const std::vector<uint8_t> table{head(14, 1), 64 | (2000 & 63), 2000 >> 6, 0, 0, 0};
  python.thread(7, python.frame(python.code(python.text("f"), python.text("g"), 5, table), 0, 0));
  EXPECT_EQ(python.read().threads.at(0).frames.at(0).line, 1005);
}

TEST(PythonMemory, NamesOfAllWidthsBecomeUtf8WithoutControls) {
  FakePython python;
  const uint64_t latin = python.text(std::vector<uint8_t>{'w', 0xf6, 0x9b, '\n'}, false);
  const uint64_t wide = python.text(std::vector<uint32_t>{0x1f600, 0x110000, 0xd800, 0x416}, false);
  python.thread(7, python.frame(python.code(latin, wide, 5, {}), 0, 0));
  const StackFrame frame = python.read().threads.at(0).frames.at(0);
  EXPECT_EQ(frame.file, "wö??");
  EXPECT_EQ(frame.function, "\xf0\x9f\x98\x80??Ж");
}

TEST(PythonMemory, AFrameThatHoldsNoCodeEndsTheStackAndIsSaid) {
  FakePython python;
  const uint64_t code = python.code(python.text("f"), python.text("g"), 5, {});
  const uint64_t none = python.frame(python.make(256), 0, 0);
  python.thread(7, python.frame(code, 0, none));
  const PythonThread thread = python.read().threads.at(0);
  EXPECT_THAT(thread.frames, SizeIs(1));
  EXPECT_EQ(thread.problem, "cannot read a frame");
}

TEST(PythonMemory, FramesThatBiteTheirTailEnd) {
  FakePython python;
  const uint64_t code = python.code(python.text("f"), python.text("g"), 5, {});
  const uint64_t frame = python.frame(code, 0, 0);
  python.set(frame + python.layout.frame_previous, frame);
  const uint64_t thread = python.thread(7, frame);
  EXPECT_TRUE(python.read().threads.at(0).truncated);
  python.set(thread + python.layout.thread_next, thread);
  EXPECT_THAT(python.read().problem, HasSubstr("more"));
}

TEST(PythonMemory, AThreadOfAnotherInterpreterIsNotFollowed) {
  FakePython python;
  const uint64_t thread = python.thread(7, 0);
  python.set(thread + python.layout.thread_interpreter, python.runtime);
  const PythonThreads read = python.read();
  EXPECT_THAT(read.threads, IsEmpty());
  EXPECT_THAT(read.problem, HasSubstr("changed, or is damaged"));
}

TEST(PythonMemory, WithoutAnInterpreterThatIsSaid) {
  FakePython python;
  python.set(python.runtime + python.layout.runtime_interpreters, uint64_t{0});
  EXPECT_THAT(python.read().problem, HasSubstr("no interpreter"));
}

std::vector<uint64_t> holdersOf(const PythonThreads& read) {
  std::vector<uint64_t> ids;
  for (const PythonThread& thread : read.threads) {
    if (thread.holds_gil) {
      ids.push_back(thread.id);
    }
  }
  return ids;
}

TEST(PythonGil, IsHeldByTheThreadThatTookIt) {
  FakePython python;
  const uint64_t holder = python.thread(7, 0);
  python.thread(8, 0);
  EXPECT_THAT(holdersOf(python.read()), IsEmpty());
  python.takeGil(holder);
  python.set(python.gil + python.layout.gil_switches, uint64_t{5});
  EXPECT_THAT(holdersOf(python.read()), ElementsAre(7));
  PythonReader reader(python.reader(), python.layout, python.runtime, python.code_type);
  const PythonThreads read = reader.all(false);
  EXPECT_THAT(holdersOf(read), ElementsAre(7));
  for (const PythonThread& thread : read.threads) {
    EXPECT_EQ(thread.gil_condition, python.gil + python.layout.gil_condition);
    EXPECT_EQ(thread.gil_switches, 5u);
    EXPECT_EQ(reader.one(thread.native_id)->holds_gil, thread.id == 7);
  }
}

TEST(PythonGil, IsNotHeldByWhoHadItLast) {
  FakePython python;
  const uint64_t last = python.thread(7, 0);
  for (const int32_t locked : {0, -1, 2}) {
    python.takeGil(last, locked);
    EXPECT_THAT(holdersOf(python.read()), IsEmpty()) << locked;
  }
}

TEST(PythonGil, IsHeldByNobodyWhoIsNoThreadOfTheList) {
  FakePython python;
  const uint64_t thread = python.thread(7, 0);
  python.takeGil(thread + 8);
  EXPECT_THAT(holdersOf(python.read()), IsEmpty());
  python.takeGil(thread);
  python.set(thread + python.layout.thread_interpreter, python.runtime);
  EXPECT_THAT(holdersOf(python.read()), IsEmpty());
}

// What changes while the threads are walked is not known.
TEST(PythonGil, IsHeldByNobodyIfItIsAnothersAfterTheWalk) {
  FakePython python;
  const uint64_t one = python.thread(7, 0), other = python.thread(8, 0);
  python.takeGil(one);
  int reads = 0;
  const ReadMemory memory = [&, read = python.reader()](uint64_t address, void* into,
                                                        size_t bytes) {
    if (address == python.gil + python.layout.gil_holder && ++reads == 2) {
      python.takeGil(other);
    }
    return read(address, into, bytes);
  };
  EXPECT_THAT(holdersOf(readPythonThreads(memory, python.layout, python.runtime, python.code_type)),
              IsEmpty());
  EXPECT_EQ(reads, 2);
  EXPECT_THAT(holdersOf(python.read()), ElementsAre(8));
}

TEST(PythonGil, IsThatOfTheInterpreterWhereEachHasItsOwn) {
  FakePython python;
  PythonLayout layout = python.layout;
  layout.interpreter_gil = 32;
  const uint64_t gil = python.make(128);
  const uint64_t thread = python.thread(7, 0);
  python.takeGil(thread);  // of 3.11: no more looked at
  const auto read = [&] {
    return readPythonThreads(python.reader(), layout, python.runtime, python.code_type);
  };
  for (const uint64_t nowhere : {uint64_t{0}, uint64_t{7}, UINT64_MAX - 4}) {
    python.set(python.interpreter + layout.interpreter_gil, nowhere);
    EXPECT_THAT(holdersOf(read()), IsEmpty());
  }
  python.set(python.interpreter + layout.interpreter_gil, gil);
  EXPECT_THAT(holdersOf(read()), IsEmpty());
  python.set(gil + layout.gil_holder, thread);
  python.set(gil + layout.gil_locked, int32_t{1});
  EXPECT_THAT(holdersOf(read()), ElementsAre(7));
  layout.gil_holder = PythonLayout::kAbsent;
  EXPECT_THAT(holdersOf(read()), IsEmpty());
}

TEST(PythonMemory, DamageNeverLeadsAstray) {
  std::mt19937_64 random(17);
  for (int run = 0; run < 300; ++run) {
    FakePython python;
    const uint64_t code = python.code(python.text("file"), python.text("name"), 5,
                                      {head(10, 8), 1, 2, head(14, 8), 64, 1});
    uint64_t frame = 0;
    for (int i = 0; i < 20; ++i) {
      frame = python.frame(code, static_cast<uint64_t>(i), frame);
    }
    python.takeGil(python.thread(7, frame));
    python.thread(8, frame);
    for (int i = 0; i < 40; ++i) {
      python.bytes[random() % 4096] = static_cast<uint8_t>(random());
    }
    for (const PythonThread& thread : python.read().threads) {
      EXPECT_LE(thread.frames.size(), 512u);
    }
  }
}

TEST(PythonLayout, IsKnownForTwoVersionsAndReadFromTheThird) {
  EXPECT_NE(pythonLayout(11), nullptr);
  EXPECT_NE(pythonLayout(12), nullptr);
  EXPECT_EQ(pythonLayout(10), nullptr);
  EXPECT_EQ(pythonLayout(13), nullptr);
  std::vector<uint64_t> description(128);
  const ReadMemory read = [&](uint64_t, void* into, size_t bytes) {
    std::memcpy(into, description.data(), std::min(bytes, description.size() * 8));
    return true;
  };
  std::string problem;
  EXPECT_FALSE(readPythonLayout(read, 1, problem));
  EXPECT_THAT(problem, HasSubstr("does not describe"));
  std::memcpy(description.data(), "xdebugpy", 8);
  description[1] = 0x030e0000;
  EXPECT_FALSE(readPythonLayout(read, 1, problem));
  EXPECT_THAT(problem, HasSubstr("a version other than 3.13"));
  description[1] = 0x030d00f0;
  description[2] = 1;
  EXPECT_FALSE(readPythonLayout(read, 1, problem));
  EXPECT_THAT(problem, HasSubstr("free-threaded"));
  description[2] = 0;
  description[5] = UINT64_MAX;
  EXPECT_FALSE(readPythonLayout(read, 1, problem));
  EXPECT_THAT(problem, HasSubstr("damaged"));
  description[5] = 632;
  const auto layout = readPythonLayout(read, 1, problem);
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout->runtime_interpreters, 632u);
  // Of the GIL it says nothing that makes sense.
  EXPECT_EQ(layout->gil_holder, PythonLayout::kAbsent);
  EXPECT_EQ(layout->interpreter_gil, PythonLayout::kAbsent);
  description[14] = 16;    // the pointer to it
  description[15] = 7752;  // the interpreter's own, and what is in it
  description[17] = 7752 + undescribedLayout().gil_locked;
  description[18] = 7752 + undescribedLayout().gil_holder;
  const auto with_gil = readPythonLayout(read, 1, problem);
  ASSERT_TRUE(with_gil);
  EXPECT_EQ(with_gil->interpreter_gil, 16u);
  EXPECT_EQ(with_gil->gil_holder, undescribedLayout().gil_holder);
  EXPECT_EQ(with_gil->runtime_gil, PythonLayout::kAbsent);
}

}  // namespace python_memory_test
}  // namespace reft
