// Kernels from PTX text: the host executes each instruction for each thread, one thread after the
// other.
//
// It knows the part of PTX that reft's own kernel uses (snapshot/device/device_xor.cc):
//
//   module      .version, .target sm_N, .address_size 64, .entry (.visible or not), comments
//   parameters  .param .u32 and .u64
//   registers   .reg .pred, .b16, .b32 and .b64; %ctaid.x, %ntid.x, %tid.x and %nctaid.x
//   statements  labels, guards (@%p, @!%p), bra, ret
//   values      ld.param, cvta.to.global.u64, cvt.u64.u32, mov
//   arithmetic  add.u32 and .u64, mul.wide.u32, and, or, xor of .b16, .b32 and .b64, shl.b64,
//               setp.eq, .ne, .lt and .ge of .u64
//   memory      ld.global and st.global of .u8, .u32 and .v4.u32 at [register]
//
// Anything else fails the load, and so does a register of another width than its instruction's. A
// driver accepts more; what passes here, ptxas accepts too. As on a device, a register holds
// garbage before the first write.
//
// Threads: any; a kernel does not change. Errors: result codes, and why a text was refused.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/results.h"

namespace reft::fake {

// A grid of one dimension.
struct PtxGrid {
  uint32_t blocks = 0;
  uint32_t threads = 0;  // per block
};

class PtxKernel {
 public:
  const std::string& name() const { return name_; }
  // Bytes of each argument.
  const std::vector<size_t>& parameters() const { return parameters_; }
  // On a device, whose memory and registered host memory are all that the threads can access.
  // kIllegalAddress or kMisalignedAddress: the first thread that did wrong ended the grid.
  Result run(PtxGrid grid, std::span<const uint64_t> arguments, const Memory& memory,
             int device) const;

 private:
  friend class PtxParser;

  enum class Op : uint8_t {
    kCopy,
    kAdd32,
    kAdd64,
    kMultiply,
    kAnd,
    kOr,
    kXor,
    kShiftLeft,
    kEqual,
    kNotEqual,
    kLess,
    kGreaterOrEqual,
    kLoad8,
    kLoad32,
    kLoad4x32,
    kStore8,
    kStore32,
    kStore4x32,
    kBranch,
    kReturn
  };
  // A slot is a thread's place for a value of up to 64 bits: a special register, an argument, a
  // register or a constant. A value has zeros above its width.
  using Slot = uint16_t;
  static constexpr Slot kBlock = 0;
  static constexpr Slot kBlockSize = 1;
  static constexpr Slot kThread = 2;
  static constexpr Slot kBlocks = 3;
  static constexpr Slot kTrue = 4;  // guards what runs always
  static constexpr Slot kArguments = 5;

  struct Instruction {
    Op op = Op::kReturn;
    bool negated = false;  // runs if the guard is false
    Slot guard = kTrue;
    Slot to = 0;  // result
    Slot a = 0;   // operands; a is the address in memory
    Slot b = 0;
    std::array<Slot, 4> values{};  // of loads and stores
    size_t target = 0;             // of a branch
  };

  std::string name_;
  std::vector<size_t> parameters_;
  std::vector<uint64_t> slots_;  // at a thread's start
  std::vector<Instruction> code_;
};

struct PtxModule {
  // `why` says, in words, what is wrong with a text that is refused (kInvalidPtx).
  static Result parse(std::string_view text, PtxModule* module, std::string* why);

  std::vector<std::shared_ptr<const PtxKernel>> kernels;
};

}  // namespace reft::fake
