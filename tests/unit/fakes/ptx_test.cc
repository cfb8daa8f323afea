// The stand-in's interpreter of PTX, through the functions of the driver.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/cuda/driver.h"

namespace reft {
namespace ptx_test {

constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kInvalidPtx = 218;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kIllegalAddress = 700;
constexpr int kMisalignedAddress = 716;
constexpr int kCaptureUnsupported = 900;
constexpr size_t kBytes = 4096;

const std::string kHead = ".version 6.0\n.target sm_50\n.address_size 64\n";

// A kernel with registers, whose arguments are in %out, %in and %word.
std::string kernel(const std::string& body) {
  return kHead + R"(
.visible .entry run(.param .u64 p_out, .param .u64 p_in, .param .u32 p_word)
{
  .reg .pred %p, %q;
  .reg .b16 %h0, %h1;
  .reg .b32 %word, %w0, %w1, %w2, %w3, %w4;
  .reg .b64 %out, %in, %d0, %d1, %d2;
  ld.param.u64 %out, [p_out];
  ld.param.u64 %in, [p_in];
  ld.param.u32 %word, [p_word];
  cvta.to.global.u64 %out, %out;
  cvta.to.global.u64 %in, %in;
)" + body +
         "\n}\n";
}

class Ptx : public testing::Test {
 protected:
  void SetUp() override {
    fake_.heal();
    ok(fake_.api.devicePrimaryCtxRetain(&other_context_, 1));
    ok(fake_.api.ctxSetCurrent(other_context_));
    ok(fake_.memAlloc(&elsewhere_, kBytes));
    ok(fake_.api.streamCreate(&other_stream_, cuda::kStreamNonBlocking, 0));
    ok(fake_.api.devicePrimaryCtxRetain(&context_, 0));
    ok(fake_.api.ctxSetCurrent(context_));
    ok(fake_.api.streamCreate(&stream_, cuda::kStreamNonBlocking, 0));
    ok(fake_.memAlloc(&out_, kBytes));
    ok(fake_.memAlloc(&in_, kBytes));
    in_argument_ = in_;
    std::memset(at(out_), 0, kBytes);
    std::memset(at(in_), 0, kBytes);
  }
  void TearDown() override {
    fake_.hold(0);
    fake_.heal();
    ok(fake_.api.ctxSetCurrent(context_));
    for (cuda::Module module : modules_) {
      ok(fake_.api.moduleUnload(module));
    }
    ok(fake_.memFree(out_));
    ok(fake_.memFree(in_));
    ok(fake_.memFree(elsewhere_));
    ok(fake_.api.streamDestroy(stream_));
    ok(fake_.api.streamDestroy(other_stream_));
    ok(fake_.api.ctxSetCurrent(nullptr));
    ok(fake_.api.devicePrimaryCtxRelease(0));
    ok(fake_.api.devicePrimaryCtxRelease(1));
  }
  void ok(cuda::Result result) {
    ASSERT_EQ(result, cuda::kSuccess) << fake_.api.describe(result) << ' ' << fake_.refusal();
  }
  unsigned char* at(cuda::Pointer address) {
    return static_cast<unsigned char*>(fake_.shadow(reinterpret_cast<void*>(address)));
  }
  uint32_t word(size_t index) {
    uint32_t found = 0;
    std::memcpy(&found, at(out_) + index * sizeof(found), sizeof(found));
    return found;
  }
  cuda::Function load(const std::string& text) {
    cuda::Module module = nullptr;
    cuda::Function function = nullptr;
    EXPECT_EQ(fake_.api.moduleLoadData(&module, text.c_str()), 0) << fake_.refusal() << text;
    if (module != nullptr) {
      modules_.push_back(module);
      EXPECT_EQ(fake_.api.moduleGetFunction(&function, module, "run"), 0);
    }
    return function;
  }
  cuda::Result launch(cuda::Function function, unsigned blocks, unsigned threads) {
    std::array<void*, 3> arguments = {&out_, &in_argument_, &word_argument_};
    return fake_.api.launchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream_,
                                  arguments.data(), nullptr);
  }
  // What the stream says after a kernel of such a body.
  cuda::Result run(const std::string& body, unsigned blocks = 1, unsigned threads = 1) {
    ok(launch(load(kernel(body)), blocks, threads));
    return fake_.api.streamSynchronize(stream_);
  }

  const FakeCuda& fake_ = FakeCuda::instance();
  cuda::Context context_ = nullptr;
  cuda::Context other_context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::Stream other_stream_ = nullptr;
  cuda::Pointer out_ = 0;
  cuda::Pointer in_ = 0;
  cuda::Pointer elsewhere_ = 0;  // on device 1
  cuda::Pointer in_argument_ = 0;
  uint32_t word_argument_ = 0;
  std::vector<cuda::Module> modules_;
};

TEST_F(Ptx, EachInstructionOfWordsComputes) {
  struct Case {
    const char* body;  // leaves its result in %w0
    uint32_t result;
  };
  word_argument_ = 0xFFFF'FFF0;
  for (const auto& [body, result] : {
           Case{"mov.u32 %w0, 4000000000;", 4'000'000'000},
           Case{"mov.b32 %w0, 0xC0DE;", 0xC0DE},
           Case{"mov.u32 %w0, %word;", 0xFFFF'FFF0},
           Case{"add.u32 %w0, %word, 17;", 1},
           Case{"add.u32 %w0, %word, %word;", 0xFFFF'FFE0},
           Case{"and.b32 %w0, %word, 0xFF;", 0xF0},
           Case{"or.b32 %w0, %word, 0xF;", 0xFFFF'FFFF},
           Case{"xor.b32 %w0, %word, 0xFFFF0000;", 0x0000'FFF0},
           Case{"xor.b32 %w0, %word, %word;", 0},
       }) {
    ok(run(std::string(body) + "st.global.u32 [%out], %w0; ret;"));
    EXPECT_EQ(word(0), result) << body;
  }
}

TEST_F(Ptx, EachInstructionOfBytesComputes) {
  struct Case {
    const char* body;  // leaves its result in %h0
    uint32_t result;
  };
  at(in_)[0] = 0xF5;
  for (const auto& [body, result] : {
           Case{"mov.u16 %h0, 0x1234;", 0x34},
           Case{"mov.b16 %h0, %h1;", 0xF5},
           Case{"and.b16 %h0, %h1, 0x3C;", 0x34},
           Case{"or.b16 %h0, %h1, 10;", 0xFF},
           Case{"xor.b16 %h0, %h1, 0xFF;", 0x0A},
           Case{"xor.b16 %h0, %h1, %h1;", 0},
       }) {
    std::memset(at(out_), 0x77, 4);
    ok(run("ld.global.u8 %h1, [%in];" + std::string(body) + "st.global.u8 [%out], %h0; ret;"));
    EXPECT_EQ(word(0), 0x7777'7700 + result) << body;  // one byte, and no other
  }
}

TEST_F(Ptx, EachInstructionOfLongsComputes) {
  struct Case {
    const char* body;  // leaves its result in %d0
    uint64_t result;
  };
  word_argument_ = 0xFFFF'FFFF;
  const std::string before = "mov.u64 %d1, 0xF0F0F0F0F0F0F0F0; mov.b64 %d2, 0xFFFFFFFFFFFFFFFF;";
  for (const auto& [body, result] : {
           Case{"mov.u64 %d0, 18446744073709551615;", ~uint64_t{0}},
           Case{"mov.b64 %d0, %d1;", 0xF0F0'F0F0'F0F0'F0F0},
           Case{"mul.wide.u32 %d0, %word, %word;", 0xFFFF'FFFE'0000'0001},
           Case{"mul.wide.u32 %d0, %word, 16;", 0xF'FFFF'FFF0},
           Case{"cvt.u64.u32 %d0, %word;", 0xFFFF'FFFF},
           Case{"cvta.to.global.u64 %d0, %d1;", 0xF0F0'F0F0'F0F0'F0F0},
           Case{"add.u64 %d0, %d2, 3;", 2},
           Case{"add.u64 %d0, %d1, %d2;", 0xF0F0'F0F0'F0F0'F0EF},
           Case{"and.b64 %d0, %d1, 0xFFFF;", 0xF0F0},
           Case{"or.b64 %d0, %d1, %d2;", ~uint64_t{0}},
           Case{"xor.b64 %d0, %d1, %d2;", 0x0F0F'0F0F'0F0F'0F0F},
           Case{"shl.b64 %d0, %d1, 4;", 0x0F0F'0F0F'0F0F'0F00},
           Case{"shl.b64 %d0, %d1, 0;", 0xF0F0'F0F0'F0F0'F0F0},
           Case{"shl.b64 %d0, %d1, 64;", 0},
           Case{"shl.b64 %d0, %d1, %word;", 0},
       }) {
    // All 64 bits, which no store of the subset takes at once.
    ok(run(before + body + "setp.eq.u64 %p, %d0, " + std::to_string(result) +
           "; mov.u32 %w0, 0; @%p mov.u32 %w0, 1; st.global.u32 [%out], %w0;"
           "add.u64 %out, %out, 4; st.global.u32 [%out], %d0; ret;"));
    EXPECT_EQ(word(0), 1u) << body;
    EXPECT_EQ(word(1), static_cast<uint32_t>(result)) << body;
  }
}

TEST_F(Ptx, ComparisonsAreUnsigned) {
  struct Case {
    uint64_t a, b;
  };
  for (const auto [a, b] : {Case{1, 1}, Case{1, 2}, Case{2, 1}, Case{~uint64_t{0}, 1},
                            Case{1, ~uint64_t{0}}, Case{uint64_t{1} << 32, 0}}) {
    std::string body = "mov.u64 %d0, " + std::to_string(a) + "; mov.u64 %d1, " + std::to_string(b) +
                       "; mov.u32 %w0, 0;";
    int bit = 1;
    for (const char* how : {"eq", "ne", "lt", "ge"}) {
      body += "setp." + std::string(how) + ".u64 %p, %d0, %d1; @%p or.b32 %w0, %w0, " +
              std::to_string(bit) + "; setp." + how + ".u64 %q, %d0, " + std::to_string(b) +
              "; @!%q or.b32 %w0, %w0, " + std::to_string(bit << 4) + ";";
      bit <<= 1;
    }
    ok(run(body + "st.global.u32 [%out], %w0; ret;"));
    const uint32_t holds =
        (a == b ? 1u : 0) | (a != b ? 2u : 0) | (a < b ? 4u : 0) | (a >= b ? 8u : 0);
    EXPECT_EQ(word(0), holds | (~holds & 0xF) << 4) << a << ' ' << b;
  }
}

// Also stores of four, at each thread's own place.
TEST_F(Ptx, EachThreadKnowsItsPlace) {
  ok(run(R"(
  mov.u32 %w0, %ctaid.x; mov.u32 %w1, %ntid.x; mov.u32 %w2, %tid.x; mov.u32 %w3, %nctaid.x;
  mul.wide.u32 %d0, %w0, %w1;
  cvt.u64.u32 %d1, %w2;
  add.u64 %d0, %d0, %d1;
  shl.b64 %d0, %d0, 4;
  add.u64 %d0, %d0, %out;
  st.global.v4.u32 [%d0], {%w0, %w1, %w2, %w3};
  ret;)",
         5, 7));
  for (uint32_t i = 0; i < 35; ++i) {
    const std::array<uint32_t, 4> found = {word(4 * i), word(4 * i + 1), word(4 * i + 2),
                                           word(4 * i + 3)};
    EXPECT_EQ(found, (std::array<uint32_t, 4>{i / 7, 7, i % 7, 5})) << "thread " << i;
  }
  EXPECT_EQ(word(35 * 4 + 1), 0u);
}

// A loop of as many rounds as the thread's number: forward and backward, with and without a guard.
TEST_F(Ptx, BranchesGoWhereTheirLabelsAre) {
  ok(run(R"(
  mov.u32 %w2, %tid.x;
  cvt.u64.u32 %d0, %w2;    // rounds to go
  shl.b64 %d1, %d0, 2;
  add.u64 %out, %out, %d1;
  mov.u32 %w0, 100; /* a comment
  of two lines */ bra TEST;
MORE:
  add.u32 %w0, %w0, 3;
  add.u64 %d0, %d0, 0xFFFFFFFFFFFFFFFF;
TEST:
  setp.ne.u64 %p, %d0, 0;
  @%p bra MORE;
  setp.eq.u64 %q, %d1, 8;  // the third thread ends here
  @%q ret;
  @!%p bra STORE;
  mov.u32 %w0, 0;
STORE:
  st.global.u32 [%out], %w0;
  setp.eq.u64 %p, %d1, 0;
  @!%p bra END;
  st.global.u32 [%out], %w2;
END:)",
         1, 5));
  const std::array<uint32_t, 5> found = {word(0), word(1), word(2), word(3), word(4)};
  EXPECT_EQ(found, (std::array<uint32_t, 5>{0, 103, 0, 109, 112}));
}

TEST_F(Ptx, LoadsAndStoresMoveWhatTheySay) {
  for (size_t i = 0; i < 64; ++i) {
    at(in_)[i] = static_cast<unsigned char>(0x80 + i);
  }
  ok(run(R"(
  add.u64 %d0, %in, 16;
  ld.global.v4.u32 {%w3, %w1, %w2, %w0}, [%d0];
  st.global.v4.u32 [%out], {%w0, %w1, %w2, %w3};  // the first and the last change places
  add.u64 %d0, %in, 4;
  ld.global.u32 %d1, [%d0];                       // into a wider register
  add.u64 %out, %out, 16;
  st.global.u32 [%out], %d1;
  add.u64 %d0, %in, 7;
  ld.global.u8 %w0, [%d0];
  add.u64 %out, %out, 4;
  st.global.u32 [%out], %w0;
  add.u64 %out, %out, 7;
  ld.global.u8 %h0, [%in];
  st.global.u8 [%out], %h0;
  ret;)"));
  const std::array<uint32_t, 8> found = {word(0), word(1), word(2), word(3),
                                         word(4), word(5), word(6), word(7)};
  EXPECT_EQ(found, (std::array<uint32_t, 8>{0x9F9E9D9C, 0x97969594, 0x9B9A9998, 0x93929190,
                                            0x87868584, 0x87, 0x80000000, 0}));
}

TEST_F(Ptx, ARegisterHoldsGarbageAtFirst) {
  ok(run("st.global.u32 [%out], %w0; mov.u32 %w0, 0; ret;", 2));
  EXPECT_NE(word(0), 0u);
}

TEST_F(Ptx, RegisteredHostMemoryIsAccessible) {
  std::array<uint32_t, 4> host = {1, 2, 3, 4};
  ok(fake_.api.memHostRegister(host.data(), sizeof(host), cuda::kHostRegisterPortable));
  in_argument_ = reinterpret_cast<cuda::Pointer>(host.data());
  ok(
      run("add.u64 %in, %in, 4; ld.global.u32 %w0, [%in]; st.global.u32 [%out], %w0;"
          "add.u64 %in, %in, 8; st.global.u32 [%in], %w0; ret;"));
  EXPECT_EQ(word(0), 2u);
  EXPECT_EQ(host, (std::array<uint32_t, 4>{1, 2, 3, 2}));
  ok(fake_.api.memHostUnregister(host.data()));
}

struct Access {
  const char* body;  // of %d0
  unsigned bytes;
};
constexpr std::array kAccesses = {
    Access{"ld.global.u8 %h0, [%d0];", 1},
    Access{"st.global.u8 [%d0], %h0;", 1},
    Access{"ld.global.u32 %w0, [%d0];", 4},
    Access{"st.global.u32 [%d0], %w0;", 4},
    Access{"ld.global.v4.u32 {%w0, %w1, %w2, %w3}, [%d0];", 16},
    Access{"st.global.v4.u32 [%d0], {%w0, %w1, %w2, %w3};", 16},
};

TEST_F(Ptx, AMisalignedAddressFailsForGood) {
  for (const auto& [access, bytes] : kAccesses) {
    for (const unsigned offset : {1, 2, 3, 4, 8, 12, 15, 16, 32}) {
      const cuda::Result wanted = offset % bytes == 0 ? cuda::kSuccess : kMisalignedAddress;
      EXPECT_EQ(run("add.u64 %d0, %out, " + std::to_string(offset) + ";" + access + "ret;"), wanted)
          << access << offset;
      EXPECT_EQ(fake_.memsetD8(in_, 1, 1, stream_), wanted);
      fake_.heal();
    }
  }
}

TEST_F(Ptx, AnIllegalAddressFailsForGood) {
  alignas(16) std::array<uint32_t, 4> host{};
  for (const auto& [access, bytes] : kAccesses) {
    for (const cuda::Pointer where : {cuda::Pointer{0}, cuda::Pointer{256}, ~cuda::Pointer{15},
                                      elsewhere_, reinterpret_cast<cuda::Pointer>(host.data())}) {
      EXPECT_EQ(run("mov.u64 %d0, " + std::to_string(where) + ";" + access + "ret;"),
                kIllegalAddress)
          << access << where;
      EXPECT_EQ(fake_.memsetD8(out_, 1, 1, stream_), kIllegalAddress);
      fake_.heal();
    }
    cuda::Pointer freed = 0;
    ok(fake_.memAlloc(&freed, kBytes));
    ok(fake_.memFree(freed));
    EXPECT_EQ(run("mov.u64 %d0, " + std::to_string(freed) + ";" + access + "ret;"),
              kIllegalAddress);
    fake_.heal();
  }
}

// The thread before the one that fails has done its work; what the stream has left is dropped.
TEST_F(Ptx, NothingRunsAfterAFailure) {
  const cuda::Function bad = load(kernel(R"(
  mov.u32 %w0, %tid.x;
  cvt.u64.u32 %d0, %w0;
  add.u64 %d0, %d0, %out;
  st.global.u32 [%d0], %word;
  ret;)"));
  const cuda::Function good = load(kernel("st.global.u32 [%in], %word; ret;"));
  fake_.hold(1);
  word_argument_ = 9;
  ok(launch(bad, 1, 2));
  ok(launch(good, 1, 1));
  fake_.hold(0);
  EXPECT_EQ(fake_.api.streamSynchronize(stream_), kMisalignedAddress);
  EXPECT_EQ(launch(good, 1, 1), kMisalignedAddress);
  EXPECT_EQ(word(0), 9u);
  EXPECT_EQ(at(in_)[0], 0);
}

TEST_F(Ptx, WhatIsUnknownIsRefusedAtTheLoad) {
  struct Case {
    std::string text;
    const char* why;
  };
  const std::string entry = kHead + ".visible .entry run(";
  for (const auto& [text, why] : {
           Case{kernel("sub.u64 %d0, %d1, %d2;"), "line 16: unknown instruction 'sub.u64'"},
           Case{kernel("add.s64 %d0, %d1, %d2;"), "unknown instruction 'add.s64'"},
           Case{kernel("setp.gt.u64 %p, %d1, %d2;"), "unknown instruction"},
           Case{kernel("ld.global.nc.u32 %w0, [%in];"), "unknown instruction"},
           Case{kernel("ld.global.v2.u32 {%w0, %w1}, [%in];"), "unknown instruction"},
           Case{kernel("st.global.u64 [%in], %d0;"), "unknown instruction"},
           Case{kernel("bar.sync 0;"), "unknown instruction"},
           Case{kernel(".shared .b32 %s;"), "unknown instruction"},
           Case{kernel("add.u64 %d0, %d1, %d3;"), "no register '%d3'"},
           Case{kernel("add.u64 %d0, %d1, %w0;"), "'%w0' has 32 bits, the instruction takes 64"},
           Case{kernel("add.u64 %w0, %d1, %d2;"), "'%w0' has 32 bits"},
           Case{kernel("cvt.u64.u32 %d0, %d1;"), "'%d1' has 64 bits"},
           Case{kernel("mul.wide.u32 %w0, %w1, %w2;"), "'%w0' has 32 bits"},
           Case{kernel("setp.eq.u64 %d0, %d1, %d2;"), "'%d0' has 64 bits"},
           Case{kernel("xor.b16 %h0, %h0, %p;"), "'%p' has 1 bits"},
           Case{kernel("ld.global.u8 %p, [%in];"), "'%p' has 1 bits"},
           Case{kernel("ld.global.u32 %h0, [%in];"), "'%h0' has 16 bits"},
           Case{kernel("ld.global.u32 %w0, [%w1];"), "'%w1' has 32 bits"},
           Case{kernel("ld.global.u32 %w0, [%in+4];"), "a character"},
           Case{kernel("ld.global.v4.u32 {%w0, %w1, %w2}, [%in];"), "expected ','"},
           Case{kernel("@%w0 ret;"), "'%w0' has 32 bits"},
           Case{kernel("mov.u32 %w0, %tid.y;"), "no register '%tid.y'"},
           Case{kernel("mov.u64 %d0, %tid.x;"), "no register '%tid.x'"},
           Case{kernel("add.u32 %w0, %w1, %tid.x;"), "no register '%tid.x'"},
           Case{kernel("mov.u32 %w0, 4294967296;"), "a number of up to 32 bits"},
           Case{kernel("mov.u64 %d0, 18446744073709551616;"), "a number of up to 64 bits"},
           Case{kernel("mov.u32 %w0, 017;"), "a number"},
           Case{kernel("mov.u32 %w0, -1;"), "a character"},
           Case{kernel("ld.param.u64 %d0, [p_word];"), "no parameter 'p_word' of 64 bits"},
           Case{kernel("ld.param.u64 %d0, [p_none];"), "no parameter 'p_none'"},
           Case{kernel("bra NOWHERE;"), "no label 'NOWHERE'"},
           Case{kernel("A: ret; A: ret;"), "'A' is declared twice"},
           Case{kernel(".reg .b32 %w0;"), "'%w0' is declared twice"},
           Case{kernel(".reg .f32 %f0;"), "'.f32' is unknown here"},
           Case{kernel(".reg .b32 %r<4>;"), "a character"},
           Case{kernel("ret"), "expected ';'"},
           Case{kernel("/* ret;"), "a comment has no end"},
           Case{kernel("ret; }") + "ret;", "expected '.entry'"},
           Case{kernel("ret;") + kernel("ret;").substr(kHead.size()), "two kernels"},
           Case{entry + ".param .f32 p) { ret; }", "'.f32' is unknown here"},
           Case{entry + ".param .u64 p, ) { ret; }", "expected '.param'"},
           Case{entry + ") { ret;", "the text ends"},
           Case{kHead + ".global .u32 total;", "expected '.entry'"},
           Case{".version 6.0\n.target sm_50\n.entry run() { ret; }", "expected '.address_size'"},
           Case{".version 6.0\n.target sm_100\n.address_size 64", "a target up to sm_90"},
           Case{".version six\n.target sm_50\n.address_size 64", "expected a version"},
           Case{"", "expected '.version'"},
           Case{"\x7f"
                "ELF\x02\x01\x01",
                "a character"},
       }) {
    cuda::Module module = nullptr;
    EXPECT_EQ(fake_.api.moduleLoadData(&module, text.c_str()), kInvalidPtx) << text;
    EXPECT_EQ(module, nullptr);
    EXPECT_NE(std::string(fake_.refusal()).find(why), std::string::npos) << fake_.refusal() << '\n'
                                                                         << text;
  }
  cuda::Module module = nullptr;
  EXPECT_EQ(fake_.api.moduleLoadData(&module, nullptr), kInvalidValue);
  load(kernel("ret;"));
  EXPECT_STREQ(fake_.refusal(), "");
}

TEST_F(Ptx, HandlesLastUntilTheModuleIsUnloaded) {
  cuda::Module module = nullptr;
  cuda::Function function = nullptr;
  ok(fake_.api.moduleLoadData(&module, kernel("st.global.u32 [%out], %word; ret;").c_str()));
  EXPECT_EQ(fake_.api.moduleGetFunction(&function, module, "walk"), kNotFound);
  EXPECT_EQ(fake_.api.moduleGetFunction(&function, this, "run"), kInvalidHandle);
  EXPECT_EQ(launch(function, 1, 1), kInvalidHandle);
  ok(fake_.api.moduleGetFunction(&function, module, "run"));
  word_argument_ = 5;
  fake_.hold(1);
  ok(launch(function, 1, 1));
  ok(fake_.api.moduleUnload(module));
  EXPECT_EQ(launch(function, 1, 1), kInvalidHandle);
  EXPECT_EQ(fake_.api.moduleUnload(module), kInvalidHandle);
  fake_.hold(0);
  ok(fake_.api.streamSynchronize(stream_));
  EXPECT_EQ(word(0), 5u);
  ok(fake_.api.ctxSetCurrent(nullptr));
  EXPECT_EQ(fake_.api.moduleLoadData(&module, kernel("ret;").c_str()), kInvalidContext);
}

TEST_F(Ptx, ArgumentsAreThoseOfTheCall) {
  const cuda::Function function = load(kernel("st.global.u32 [%out], %word; ret;"));
  fake_.hold(1);
  word_argument_ = 5;
  ok(launch(function, 1, 1));
  word_argument_ = 6;
  fake_.hold(0);
  ok(fake_.api.streamSynchronize(stream_));
  EXPECT_EQ(word(0), 5u);
}

TEST_F(Ptx, OnlyGridsOfOneDimensionAreLaunched) {
  const cuda::Function function = load(kernel("st.global.u32 [%out], %word; ret;"));
  std::array<void*, 3> arguments = {&out_, &in_argument_, &word_argument_};
  const auto launched = [&](std::array<unsigned, 6> grid, cuda::Stream stream, void** values) {
    return fake_.api.launchKernel(function, grid[0], grid[1], grid[2], grid[3], grid[4], grid[5], 0,
                                  stream, values, nullptr);
  };
  ok(launched({1, 1, 1, 1024, 1, 1}, stream_, arguments.data()));
  EXPECT_EQ(launched({1, 1, 1, 1025, 1, 1}, stream_, arguments.data()), kInvalidValue);
  for (size_t i = 0; i < 6; ++i) {
    std::array<unsigned, 6> grid = {1, 1, 1, 1, 1, 1};
    grid[i] = 0;
    EXPECT_EQ(launched(grid, stream_, arguments.data()), kInvalidValue);
    grid[i] = 2;
    EXPECT_EQ(launched(grid, stream_, arguments.data()), i % 3 == 0 ? 0 : kInvalidValue);
  }
  EXPECT_EQ(launched({1, 1, 1, 1, 1, 1}, stream_, nullptr), kInvalidValue);
  EXPECT_EQ(launched({1, 1, 1, 1, 1, 1}, other_stream_, arguments.data()), kInvalidHandle);
  ok(fake_.api.streamSynchronize(stream_));
}

TEST_F(Ptx, ACaptureRecordsLaunchesAndForbidsLoads) {
  constexpr int kModeGlobal = 0;
  const cuda::Function function = load(kernel("st.global.u32 [%out], %word; ret;"));
  word_argument_ = 5;
  void* graph = nullptr;
  ok(fake_.beginCapture(stream_, kModeGlobal));
  ok(launch(function, 1, 1));
  ok(fake_.endCapture(stream_, &graph));
  ok(fake_.destroyGraph(graph));
  ok(fake_.api.streamSynchronize(stream_));
  EXPECT_EQ(word(0), 0u);
  cuda::Module module = nullptr;
  ok(fake_.beginCapture(stream_, kModeGlobal));
  EXPECT_EQ(fake_.api.moduleLoadData(&module, kernel("ret;").c_str()), kCaptureUnsupported);
  EXPECT_NE(fake_.endCapture(stream_, &graph), cuda::kSuccess);
}

}  // namespace ptx_test
}  // namespace reft
