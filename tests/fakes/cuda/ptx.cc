#include "tests/fakes/cuda/ptx.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "tests/fakes/cuda/device_access.h"

namespace reft::fake {

namespace {

constexpr uint64_t kGarbage = 0xA5A5'A5A5'A5A5'A5A5;
constexpr uint64_t kNewestTarget = 90;  // the stand-in's compute capability; see driver.cc

constexpr uint64_t lowBits(unsigned bits) {
  return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
}

// Why a text is no module that the stand-in can run. Never leaves this file.
struct PtxRefusal {
  std::string why;
};

// A word (a name, a number, an instruction with its suffixes) or one mark; empty at the end.
struct PtxToken {
  std::string_view text;
  int line = 0;
};

bool isDigit(char c) {
  return c >= '0' && c <= '9';
}
bool isWordPart(char c) {
  return isDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' ||
         c == '%' || c == '.';
}
bool isName(std::string_view word) {
  const bool marked = !word.empty() && (word[0] == '_' || word[0] == '$' || word[0] == '%');
  const std::string_view rest = word.substr(marked ? 1 : 0);
  return !rest.empty() && (marked || !isDigit(rest[0])) &&
         rest.find_first_of("%.") == std::string_view::npos;
}

[[noreturn]] void refuse(const PtxToken& at, const std::string& what) {
  throw PtxRefusal{"line " + std::to_string(at.line) + ": " + what};
}
[[noreturn]] void refuseWord(const PtxToken& at, const std::string& expected) {
  refuse(at, at.text.empty()
                 ? "the text ends, expected " + expected
                 : "'" + std::string(at.text) + "' is unknown here, expected " + expected);
}

std::vector<PtxToken> tokensOf(std::string_view text) {
  std::vector<PtxToken> tokens;
  int line = 1;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    const std::string_view two = text.substr(i, 2);
    size_t end = i + 1;
    if (two == "//") {
      end = std::min(text.find('\n', i), text.size());
    } else if (two == "/*") {
      end = text.find("*/", i + 2);
      if (end == std::string_view::npos) {
        refuse({two, line}, "a comment has no end");
      }
      end += 2;
    } else if (isWordPart(c)) {
      while (end < text.size() && isWordPart(text[end])) {
        ++end;
      }
      tokens.push_back({text.substr(i, end - i), line});
    } else if (std::string_view("{}()[],;:@!").find(c) != std::string_view::npos) {
      tokens.push_back({text.substr(i, 1), line});
    } else if (std::string_view(" \t\r\n").find(c) == std::string_view::npos) {
      refuse({two, line}, "a character that no known statement has");
    }
    line += static_cast<int>(std::count(text.begin() + static_cast<ptrdiff_t>(i),
                                        text.begin() + static_cast<ptrdiff_t>(end), '\n'));
    i = end;
  }
  tokens.push_back({{}, line});
  return tokens;
}

std::optional<uint64_t> numberOf(std::string_view word) {
  const bool hex = word.starts_with("0x");
  const std::string_view digits = word.substr(hex ? 2 : 0);
  if (!hex && digits.size() > 1 && digits[0] == '0') {
    return std::nullopt;  // octal
  }
  uint64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto read = std::from_chars(digits.data(), end, value, hex ? 16 : 10);
  return read.ec == std::errc() && read.ptr == end ? std::optional(value) : std::nullopt;
}

// What threads may access of their device's and of registered memory. Kept for one launch: memory
// that a kernel uses is not freed while it runs.
class GlobalMemory {
 public:
  GlobalMemory(const Memory& memory, int device) : memory_(memory), device_(device) {}

  // Where the host finds `bytes` at `address`; nullptr if no memory holds all of them.
  char* find(uint64_t address, size_t bytes) {
    for (const Range& range : recent_) {
      if (char* const at = within(range, address, bytes); at != nullptr) {
        return at;
      }
    }
    const auto range = memory_.find(reinterpret_cast<const void*>(address));
    if (!range || (range->kind == MemoryKind::kDevice && range->device != device_)) {
      return nullptr;
    }
    oldest_ = (oldest_ + 1) % recent_.size();
    recent_[oldest_] = *range;
    return within(*range, address, bytes);
  }

 private:
  static char* within(const Range& range, uint64_t address, size_t bytes) {
    const uint64_t offset = address - reinterpret_cast<uint64_t>(range.base);
    return range.bytes >= bytes && offset <= range.bytes - bytes ? range.shadow + offset : nullptr;
  }

  const Memory& memory_;
  const int device_;
  std::array<Range, 4> recent_{};  // those of 0 bytes hold nothing
  size_t oldest_ = 0;
};

template <typename Value>
Result load(GlobalMemory& memory, uint64_t address, uint64_t* slots, std::span<const uint16_t> to) {
  if (address % (sizeof(Value) * to.size()) != 0) {
    return kMisalignedAddress;
  }
  std::array<Value, 4> values{};
  const size_t bytes = sizeof(Value) * to.size();
  const char* const at = memory.find(address, bytes);
  if (at == nullptr) {
    return kIllegalAddress;
  }
  std::memcpy(values.data(), at, bytes);
  for (size_t i = 0; i < to.size(); ++i) {
    slots[to[i]] = values[i];
  }
  return kSuccess;
}

template <typename Value>
Result store(GlobalMemory& memory, uint64_t address, const uint64_t* slots,
             std::span<const uint16_t> from) {
  if (address % (sizeof(Value) * from.size()) != 0) {
    return kMisalignedAddress;
  }
  std::array<Value, 4> values{};
  const size_t bytes = sizeof(Value) * from.size();
  char* const at = memory.find(address, bytes);
  if (at == nullptr) {
    return kIllegalAddress;
  }
  for (size_t i = 0; i < from.size(); ++i) {
    values[i] = static_cast<Value>(slots[from[i]]);
  }
  std::memcpy(at, values.data(), bytes);
  return kSuccess;
}

}  // namespace

// -- parsing

class PtxParser {
 public:
  explicit PtxParser(std::string_view text) : tokens_(tokensOf(text)) {}

  std::vector<std::shared_ptr<const PtxKernel>> kernels() {
    header();
    std::vector<std::shared_ptr<const PtxKernel>> found;
    std::set<std::string_view> names;
    while (!next().text.empty()) {
      const PtxToken begin = next();
      found.push_back(kernel());
      if (!names.insert(found.back()->name()).second) {
        refuse(begin, "two kernels are called '" + found.back()->name() + "'");
      }
    }
    return found;
  }

 private:
  using Op = PtxKernel::Op;
  using Slot = PtxKernel::Slot;
  using Instruction = PtxKernel::Instruction;

  enum class Form {
    kMove,       // to, register or number or (32 bits) special register
    kConvert,    // to, register
    kBinary,     // to, register, register or number
    kParameter,  // to, [parameter]
    kLoad,       // to, [register]
    kStore,      // [register], from
    kLoad4,      // {to, to, to, to}, [register]
    kStore4,     // [register], {from, from, from, from}
    kBranch,     // label
    kReturn
  };
  struct Mnemonic {
    std::string_view name;
    Op op;
    Form form;
    unsigned to_bits = 0;  // of the result; of one value that is loaded or stored
    unsigned a_bits = 0;   // of the operands
    unsigned b_bits = 0;
  };
  struct Register {
    Slot slot = 0;
    unsigned bits = 0;  // 1: a predicate
  };

  static const Mnemonic* find(std::string_view name) {
    static constexpr Mnemonic kKnown[] = {
        {"mov.u16", Op::kCopy, Form::kMove, 16, 16},
        {"mov.b16", Op::kCopy, Form::kMove, 16, 16},
        {"mov.u32", Op::kCopy, Form::kMove, 32, 32},
        {"mov.b32", Op::kCopy, Form::kMove, 32, 32},
        {"mov.u64", Op::kCopy, Form::kMove, 64, 64},
        {"mov.b64", Op::kCopy, Form::kMove, 64, 64},
        {"cvta.to.global.u64", Op::kCopy, Form::kConvert, 64, 64},  // the same number
        {"cvt.u64.u32", Op::kCopy, Form::kConvert, 64, 32},
        {"add.u32", Op::kAdd32, Form::kBinary, 32, 32, 32},
        {"add.u64", Op::kAdd64, Form::kBinary, 64, 64, 64},
        {"mul.wide.u32", Op::kMultiply, Form::kBinary, 64, 32, 32},
        {"and.b16", Op::kAnd, Form::kBinary, 16, 16, 16},
        {"and.b32", Op::kAnd, Form::kBinary, 32, 32, 32},
        {"and.b64", Op::kAnd, Form::kBinary, 64, 64, 64},
        {"or.b16", Op::kOr, Form::kBinary, 16, 16, 16},
        {"or.b32", Op::kOr, Form::kBinary, 32, 32, 32},
        {"or.b64", Op::kOr, Form::kBinary, 64, 64, 64},
        {"xor.b16", Op::kXor, Form::kBinary, 16, 16, 16},
        {"xor.b32", Op::kXor, Form::kBinary, 32, 32, 32},
        {"xor.b64", Op::kXor, Form::kBinary, 64, 64, 64},
        {"shl.b64", Op::kShiftLeft, Form::kBinary, 64, 64, 32},
        {"setp.eq.u64", Op::kEqual, Form::kBinary, 1, 64, 64},
        {"setp.ne.u64", Op::kNotEqual, Form::kBinary, 1, 64, 64},
        {"setp.lt.u64", Op::kLess, Form::kBinary, 1, 64, 64},
        {"setp.ge.u64", Op::kGreaterOrEqual, Form::kBinary, 1, 64, 64},
        {"ld.param.u32", Op::kCopy, Form::kParameter, 32},
        {"ld.param.u64", Op::kCopy, Form::kParameter, 64},
        {"ld.global.u8", Op::kLoad8, Form::kLoad, 8},
        {"ld.global.u32", Op::kLoad32, Form::kLoad, 32},
        {"ld.global.v4.u32", Op::kLoad4x32, Form::kLoad4, 32},
        {"st.global.u8", Op::kStore8, Form::kStore, 8},
        {"st.global.u32", Op::kStore32, Form::kStore, 32},
        {"st.global.v4.u32", Op::kStore4x32, Form::kStore4, 32},
        {"bra", Op::kBranch, Form::kBranch},
        {"ret", Op::kReturn, Form::kReturn},
    };
    const auto* const found = std::find_if(std::begin(kKnown), std::end(kKnown),
                                           [&](const Mnemonic& one) { return one.name == name; });
    return found == std::end(kKnown) ? nullptr : found;
  }

  const PtxToken& next() const { return tokens_[at_]; }
  bool take(std::string_view text) {
    const bool is_there = next().text == text;
    at_ += is_there ? 1 : 0;
    return is_there;
  }
  void expect(std::string_view text) {
    if (!take(text)) {
      refuseWord(next(), "'" + std::string(text) + "'");
    }
  }
  // The last token, which ends the text, stays.
  PtxToken takeWord(const std::string& expected) {
    const PtxToken word = next();
    if (word.text.empty() || !isWordPart(word.text[0])) {
      refuseWord(word, expected);
    }
    ++at_;
    return word;
  }

  void header() {
    expect(".version");
    const PtxToken version = takeWord("a version");
    const size_t dot = version.text.find('.');
    if (dot == std::string_view::npos || !numberOf(version.text.substr(0, dot)) ||
        !numberOf(version.text.substr(dot + 1))) {
      refuseWord(version, "a version");
    }
    expect(".target");
    const PtxToken target = takeWord("a target");
    const auto capability =
        target.text.starts_with("sm_") ? numberOf(target.text.substr(3)) : std::nullopt;
    if (!capability || *capability > kNewestTarget) {
      refuseWord(target, "a target up to sm_" + std::to_string(kNewestTarget));
    }
    expect(".address_size");
    expect("64");
  }

  std::shared_ptr<const PtxKernel> kernel() {
    kernel_ = PtxKernel();
    kernel_.slots_ = {0, 0, 0, 0, 1};  // kBlock, kBlockSize, kThread, kBlocks, kTrue
    names_.clear();
    parameters_.clear();
    registers_.clear();
    labels_.clear();
    branches_.clear();
    take(".visible");
    expect(".entry");
    const PtxToken name = takeWord("a kernel's name");
    declare(name);
    kernel_.name_ = name.text;
    expect("(");
    while (!take(")")) {
      parameter();
      if (next().text != ")") {
        expect(",");
        if (next().text == ")") {
          refuseWord(next(), "'.param'");
        }
      }
    }
    expect("{");
    while (!take("}")) {
      statement();
    }
    kernel_.code_.emplace_back();  // the end of a body returns
    for (const auto& [index, label] : branches_) {
      const auto found = labels_.find(label.text);
      if (found == labels_.end()) {
        refuse(label, "no label '" + std::string(label.text) + "'");
      }
      kernel_.code_[index].target = found->second;
    }
    return std::make_shared<const PtxKernel>(std::move(kernel_));
  }

  void declare(const PtxToken& name) {
    if (!isName(name.text)) {
      refuseWord(name, "a name");
    }
    if (!names_.insert(name.text).second) {
      refuse(name, "'" + std::string(name.text) + "' is declared twice");
    }
  }

  Slot newSlot(uint64_t value) {
    if (kernel_.slots_.size() > std::numeric_limits<Slot>::max()) {
      refuse(next(), "too many registers and numbers");
    }
    kernel_.slots_.push_back(value);
    return static_cast<Slot>(kernel_.slots_.size() - 1);
  }

  void parameter() {
    expect(".param");
    const PtxToken type = takeWord("'.u32' or '.u64'");
    if (type.text != ".u32" && type.text != ".u64") {
      refuseWord(type, "'.u32' or '.u64'");
    }
    const PtxToken name = takeWord("a parameter's name");
    declare(name);
    const unsigned bits = type.text == ".u32" ? 32 : 64;
    parameters_[name.text] = {newSlot(0), bits};
    kernel_.parameters_.push_back(bits / 8);
  }

  void statement() {
    if (take(".reg")) {
      declareRegisters();
      return;
    }
    Instruction made;
    const bool guarded = take("@");
    if (guarded) {
      made.negated = take("!");
      made.guard = registerOf(1, /*wider=*/false);
    }
    const PtxToken word = takeWord("a statement");
    if (!guarded && take(":")) {
      declare(word);
      labels_[word.text] = kernel_.code_.size();
      return;
    }
    const Mnemonic* const known = find(word.text);
    if (known == nullptr) {
      refuse(word, "unknown instruction '" + std::string(word.text) + "'");
    }
    made.op = known->op;
    operands(*known, &made);
    expect(";");
    kernel_.code_.push_back(made);
  }

  void declareRegisters() {
    static constexpr std::pair<std::string_view, unsigned> kTypes[] = {
        {".pred", 1}, {".b16", 16}, {".b32", 32}, {".b64", 64}};
    const PtxToken type = takeWord("a register's type");
    const auto* const known = std::find_if(std::begin(kTypes), std::end(kTypes),
                                           [&](const auto& one) { return one.first == type.text; });
    if (known == std::end(kTypes)) {
      refuseWord(type, "'.pred', '.b16', '.b32' or '.b64'");
    }
    do {
      const PtxToken name = takeWord("a register's name");
      declare(name);
      registers_[name.text] = {newSlot(kGarbage & lowBits(known->second)), known->second};
    } while (take(","));
    expect(";");
  }

  void operands(const Mnemonic& known, Instruction* made) {
    switch (known.form) {
      case Form::kMove:
        made->to = registerOf(known.to_bits, /*wider=*/false);
        expect(",");
        made->a = known.a_bits == 32 && special() ? takeSpecial() : valueOf(known.a_bits);
        break;
      case Form::kConvert:
        made->to = registerOf(known.to_bits, /*wider=*/false);
        expect(",");
        made->a = registerOf(known.a_bits, /*wider=*/false);
        break;
      case Form::kBinary:
        made->to = registerOf(known.to_bits, /*wider=*/false);
        expect(",");
        made->a = registerOf(known.a_bits, /*wider=*/false);
        expect(",");
        made->b = valueOf(known.b_bits);
        break;
      case Form::kParameter:
        made->to = registerOf(known.to_bits, /*wider=*/true);
        expect(",");
        made->a = parameterOf(known.to_bits);
        break;
      case Form::kLoad:
        made->values[0] = registerOf(known.to_bits, /*wider=*/true);
        expect(",");
        made->a = addressOf();
        break;
      case Form::kStore:
        made->a = addressOf();
        expect(",");
        made->values[0] = registerOf(known.to_bits, /*wider=*/true);
        break;
      case Form::kLoad4:
        made->values = fourOf(known.to_bits);
        expect(",");
        made->a = addressOf();
        break;
      case Form::kStore4:
        made->a = addressOf();
        expect(",");
        made->values = fourOf(known.to_bits);
        break;
      case Form::kBranch: branches_.emplace_back(kernel_.code_.size(), takeWord("a label")); break;
      case Form::kReturn: break;
    }
  }

  // What loads and stores move may be narrower than its register, never a predicate.
  Slot registerOf(unsigned bits, bool wider) {
    const PtxToken word = takeWord("a register");
    const auto found = registers_.find(word.text);
    if (found == registers_.end()) {
      refuse(word, "no register '" + std::string(word.text) + "'");
    }
    const Register& one = found->second;
    if (wider ? one.bits < std::max(bits, 16u) : one.bits != bits) {
      refuse(word, "'" + std::string(word.text) + "' has " + std::to_string(one.bits) +
                       " bits, the instruction takes " + std::to_string(bits));
    }
    return one.slot;
  }

  Slot valueOf(unsigned bits) {
    const PtxToken word = next();
    if (word.text.empty() || !isDigit(word.text[0])) {
      return registerOf(bits, /*wider=*/false);
    }
    ++at_;
    const auto number = numberOf(word.text);
    if (!number || *number > lowBits(bits)) {
      refuseWord(word, "a number of up to " + std::to_string(bits) + " bits");
    }
    return newSlot(*number);
  }

  std::optional<Slot> special() const {
    static constexpr std::pair<std::string_view, Slot> kSpecial[] = {
        {"%ctaid.x", PtxKernel::kBlock},
        {"%ntid.x", PtxKernel::kBlockSize},
        {"%tid.x", PtxKernel::kThread},
        {"%nctaid.x", PtxKernel::kBlocks}};
    for (const auto& [name, slot] : kSpecial) {
      if (next().text == name) {
        return slot;
      }
    }
    return std::nullopt;
  }
  Slot takeSpecial() {
    const Slot found = *special();
    ++at_;
    return found;
  }

  Slot parameterOf(unsigned bits) {
    expect("[");
    const PtxToken word = takeWord("a parameter");
    const auto found = parameters_.find(word.text);
    if (found == parameters_.end() || found->second.bits != bits) {
      refuse(word,
             "no parameter '" + std::string(word.text) + "' of " + std::to_string(bits) + " bits");
    }
    expect("]");
    return found->second.slot;
  }

  Slot addressOf() {
    expect("[");
    const Slot found = registerOf(64, /*wider=*/false);
    expect("]");
    return found;
  }

  std::array<Slot, 4> fourOf(unsigned bits) {
    std::array<Slot, 4> four{};
    for (size_t i = 0; i < four.size(); ++i) {
      expect(i == 0 ? "{" : ",");
      four[i] = registerOf(bits, /*wider=*/true);
    }
    expect("}");
    return four;
  }

  const std::vector<PtxToken> tokens_;
  size_t at_ = 0;
  // Of the kernel that is being read.
  PtxKernel kernel_;
  std::set<std::string_view> names_;
  std::map<std::string_view, Register> parameters_, registers_;
  std::map<std::string_view, size_t> labels_;
  std::vector<std::pair<size_t, PtxToken>> branches_;  // an instruction and its label
};

Result PtxModule::parse(std::string_view text, PtxModule* module, std::string* why) {
  try {
    module->kernels = PtxParser(text).kernels();
  } catch (const PtxRefusal& refusal) {
    *why = refusal.why;
    return kInvalidPtx;
  }
  why->clear();
  return kSuccess;
}

// -- running

Result PtxKernel::run(PtxGrid grid, std::span<const uint64_t> arguments, const Memory& memory,
                      int device) const {
  GlobalMemory global(memory, device);
  const DeviceAccess access;
  std::vector<uint64_t> initial = slots_;
  initial[kBlockSize] = grid.threads;
  initial[kBlocks] = grid.blocks;
  std::copy(arguments.begin(), arguments.end(), initial.begin() + kArguments);
  std::vector<uint64_t> thread(initial.size());
  uint64_t* const slots = thread.data();

  const auto runThread = [&]() -> Result {
    for (size_t at = 0;;) {
      const Instruction& one = code_[at++];
      if ((slots[one.guard] != 0) == one.negated) {
        continue;
      }
      const uint64_t a = slots[one.a];
      const uint64_t b = slots[one.b];
      uint64_t& to = slots[one.to];
      const std::span<const Slot> four(one.values);
      Result result = kSuccess;
      switch (one.op) {
        case Op::kCopy: to = a; break;
        case Op::kAdd32: to = (a + b) & lowBits(32); break;
        case Op::kAdd64: to = a + b; break;
        case Op::kMultiply: to = a * b; break;  // 32 bits each
        case Op::kAnd: to = a & b; break;
        case Op::kOr: to = a | b; break;
        case Op::kXor: to = a ^ b; break;
        case Op::kShiftLeft: to = b < 64 ? a << b : 0; break;
        case Op::kEqual: to = a == b ? 1 : 0; break;
        case Op::kNotEqual: to = a != b ? 1 : 0; break;
        case Op::kLess: to = a < b ? 1 : 0; break;
        case Op::kGreaterOrEqual: to = a >= b ? 1 : 0; break;
        case Op::kLoad8: result = load<uint8_t>(global, a, slots, four.first(1)); break;
        case Op::kLoad32: result = load<uint32_t>(global, a, slots, four.first(1)); break;
        case Op::kLoad4x32: result = load<uint32_t>(global, a, slots, four); break;
        case Op::kStore8: result = store<uint8_t>(global, a, slots, four.first(1)); break;
        case Op::kStore32: result = store<uint32_t>(global, a, slots, four.first(1)); break;
        case Op::kStore4x32: result = store<uint32_t>(global, a, slots, four); break;
        case Op::kBranch: at = one.target; break;
        case Op::kReturn: return kSuccess;
      }
      if (result != kSuccess) {
        return result;
      }
    }
  };

  for (uint32_t block = 0; block < grid.blocks; ++block) {
    initial[kBlock] = block;
    for (uint32_t i = 0; i < grid.threads; ++i) {
      initial[kThread] = i;
      std::copy(initial.begin(), initial.end(), thread.begin());
      if (const Result result = runThread(); result != kSuccess) {
        return result;
      }
    }
  }
  return kSuccess;
}

}  // namespace reft::fake
