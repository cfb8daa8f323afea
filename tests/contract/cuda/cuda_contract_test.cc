// What reft takes for granted of a CUDA driver, through reft's own table. Runs against the stand-in
// of tests/fakes/cuda, and, with REFT_REQUIRE_CUDA=1, against the driver of the machine: the
// stand-in is held to the truth.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "intercept/driver/cuda_api.h"
#include "intercept/driver/dynamic_library.h"

namespace reft {
namespace {

bool onRealDriver() {
  const char* text = std::getenv("REFT_REQUIRE_CUDA");
  return text != nullptr && std::string(text) == "1";
}

const DynamicLibrary& driver() {
  static const auto* const one = new DynamicLibrary(
      DynamicLibrary::open({onRealDriver() ? "libcuda.so.1" : REFT_FAKE_CUDA_DRIVER}));
  return *one;
}

// Of the driver, but no part of reft's table, which only has what reft itself calls.
struct Extra {
  int (*memAlloc)(cuda::Pointer*, size_t) = find<int (*)(cuda::Pointer*, size_t)>("cuMemAlloc_v2");
  int (*memFree)(cuda::Pointer) = find<int (*)(cuda::Pointer)>("cuMemFree_v2");
  int (*memsetD8)(cuda::Pointer, unsigned char, size_t, cuda::Stream) =
      find<int (*)(cuda::Pointer, unsigned char, size_t, cuda::Stream)>("cuMemsetD8Async");
  int (*beginCapture)(cuda::Stream,
                      int) = find<int (*)(cuda::Stream, int)>("cuStreamBeginCapture_v2");
  int (*endCapture)(cuda::Stream,
                    void**) = find<int (*)(cuda::Stream, void**)>("cuStreamEndCapture");
  int (*destroyGraph)(void*) = find<int (*)(void*)>("cuGraphDestroy");

  template <typename Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(driver().find(name));
  }
};

constexpr size_t kBytes = size_t{8} << 20;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureInvalidated = 901;
constexpr int kCaptureUnjoined = 904;
constexpr int kCapturedEvent = 907;
constexpr int kModeGlobal = 0;

class CudaContract : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(api_.available()) << api_.why;
    ok(api_.devicePrimaryCtxRetain(&context_, 0));
    ok(api_.ctxSetCurrent(context_));
    ok(api_.streamCreate(&stream_, cuda::kStreamNonBlocking, 0));
    ok(api_.streamCreate(&other_, cuda::kStreamNonBlocking, 0));
    ok(api_.eventCreate(&event_, cuda::kEventDisableTiming));
    ok(extra_.memAlloc(&device_, kBytes));
    host_.resize(kBytes);
    ok(api_.memHostRegister(host_.data(), kBytes, cuda::kHostRegisterPortable));
  }
  void TearDown() override {
    if (!api_.available()) {
      return;
    }
    ok(api_.streamSynchronize(stream_));
    ok(api_.streamSynchronize(other_));
    ok(api_.memHostUnregister(host_.data()));
    ok(extra_.memFree(device_));
    ok(api_.eventDestroy(event_));
    ok(api_.streamDestroy(stream_));
    ok(api_.streamDestroy(other_));
    ok(api_.ctxSetCurrent(nullptr));
    ok(api_.devicePrimaryCtxRelease(0));
  }
  static void ok(cuda::Result result) {
    EXPECT_EQ(result, cuda::kSuccess) << api_.describe(result);
  }
  void fill(unsigned char value, cuda::Stream stream) {
    ok(extra_.memsetD8(device_, value, kBytes, stream));
  }
  bool hostIsAll(unsigned char value) const {
    for (const unsigned char byte : host_) {
      if (byte != value) {
        return false;
      }
    }
    return true;
  }

  static const CudaApi api_;
  const Extra extra_{};
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::Stream other_ = nullptr;
  cuda::Event event_ = nullptr;
  cuda::Pointer device_ = 0;
  std::vector<unsigned char> host_;
};
const CudaApi CudaContract::api_ = CudaApi::from(driver());

TEST_F(CudaContract, CopiesThereAndBack) {
  std::memset(host_.data(), 7, kBytes);
  ok(api_.memcpyHtoDAsync(device_, host_.data(), kBytes, stream_));
  ok(api_.streamSynchronize(stream_));
  std::memset(host_.data(), 0, kBytes);
  ok(api_.memcpyDtoHAsync(host_.data(), device_, kBytes, stream_));
  ok(api_.streamSynchronize(stream_));
  EXPECT_TRUE(hostIsAll(7));
}

TEST_F(CudaContract, WorkOfAStreamRunsInOrder) {
  for (int i = 1; i <= 50; ++i) {
    fill(static_cast<unsigned char>(i), stream_);
  }
  ok(api_.memcpyDtoHAsync(host_.data(), device_, kBytes, stream_));
  fill(99, stream_);
  ok(api_.streamSynchronize(stream_));
  EXPECT_TRUE(hostIsAll(50));
}

TEST_F(CudaContract, AnEventOrdersStreams) {
  for (int round = 1; round <= 20; ++round) {
    fill(static_cast<unsigned char>(round), stream_);
    ok(api_.eventRecord(event_, stream_));
    ok(api_.streamWaitEvent(other_, event_, 0));
    ok(api_.memcpyDtoHAsync(host_.data(), device_, kBytes, other_));
    ok(api_.eventRecord(event_, other_));
    ok(api_.streamWaitEvent(stream_, event_, 0));
    fill(255, stream_);
    ok(api_.streamSynchronize(stream_));
    ASSERT_TRUE(hostIsAll(static_cast<unsigned char>(round))) << "round " << round;
  }
}

TEST_F(CudaContract, AnEventIsWhatItWasAtTheWait) {
  fill(1, stream_);
  ok(api_.eventRecord(event_, stream_));
  ok(api_.streamWaitEvent(other_, event_, 0));
  ok(api_.eventRecord(event_, stream_));  // recorded anew: those who wait, wait for the old one
  ok(api_.streamSynchronize(other_));
  ok(api_.streamSynchronize(stream_));
  ok(api_.eventQuery(event_));
}

TEST_F(CudaContract, AnEventThatWasNeverRecordedHoldsNobodyUp) {
  ok(api_.eventQuery(event_));
  ok(api_.streamWaitEvent(stream_, event_, 0));
  ok(api_.streamSynchronize(stream_));
}

TEST_F(CudaContract, AValueIsWrittenAfterWhatCameBefore) {
  auto* const mark = reinterpret_cast<std::atomic<uint32_t>*>(host_.data());
  mark->store(0);
  cuda::Pointer address = 0;
  ok(api_.memHostGetDevicePointer(&address, host_.data(), 0));
  fill(3, stream_);
  ok(api_.memcpyDtoHAsync(host_.data() + 4096, device_, kBytes - 4096, stream_));
  ok(api_.streamWriteValue32(stream_, address, 17, 0));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (mark->load(std::memory_order_acquire) != 17 && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  ASSERT_EQ(mark->load(), 17u);
  EXPECT_EQ(host_[4096], 3);
  EXPECT_EQ(host_[kBytes - 1], 3);
}

TEST_F(CudaContract, MemoryIsRegisteredOnceAndUnregisteredOnce) {
  EXPECT_EQ(api_.memHostRegister(host_.data(), kBytes, cuda::kHostRegisterPortable), 712);
  std::vector<unsigned char> more(8192);
  EXPECT_EQ(api_.memHostUnregister(more.data()), 713);
  ok(api_.memHostRegister(more.data(), more.size(), cuda::kHostRegisterPortable));
  ok(api_.memHostUnregister(more.data()));
}

TEST_F(CudaContract, AThreadWithoutContextGetsNothing) {
  cuda::Result result = cuda::kSuccess;
  std::thread([&] {
    cuda::Stream stream = nullptr;
    result = api_.streamCreate(&stream, cuda::kStreamNonBlocking, 0);
  }).join();
  EXPECT_EQ(result, 201);
}

TEST_F(CudaContract, TheLowestPriorityIsTheLargestNumber) {
  int lowest = 0;
  int highest = 0;
  ok(api_.ctxGetStreamPriorityRange(&lowest, &highest));
  EXPECT_GE(lowest, highest);
  cuda::Stream low = nullptr;
  ok(api_.streamCreate(&low, cuda::kStreamNonBlocking, lowest));
  ok(api_.streamDestroy(low));
}

TEST_F(CudaContract, CaptureIsToldApart) {
  int status = -1;
  ok(api_.streamIsCapturing(stream_, &status));
  EXPECT_EQ(status, cuda::kCaptureNone);
  ok(extra_.beginCapture(stream_, kModeGlobal));
  ok(api_.streamIsCapturing(stream_, &status));
  EXPECT_NE(status, cuda::kCaptureNone);
  void* graph = nullptr;
  ok(extra_.endCapture(stream_, &graph));
  ok(extra_.destroyGraph(graph));
}

TEST_F(CudaContract, CapturedWorkDoesNotRun) {
  std::memset(host_.data(), 5, kBytes);
  ok(api_.memcpyHtoDAsync(device_, host_.data(), kBytes, stream_));
  ok(extra_.beginCapture(stream_, kModeGlobal));
  fill(6, stream_);
  void* graph = nullptr;
  ok(extra_.endCapture(stream_, &graph));
  ok(extra_.destroyGraph(graph));
  ok(api_.memcpyDtoHAsync(host_.data(), device_, kBytes, stream_));
  ok(api_.streamSynchronize(stream_));
  EXPECT_TRUE(hostIsAll(5));
}

// A stream that waits for a captured event belongs to the capture. What it does has to be waited
// for before the end, and only that: the wait alone has not.
TEST_F(CudaContract, WorkOfAStreamThatJoinsACaptureHasToBeJoinedBack) {
  struct Case {
    bool works, joined;
  };
  for (const auto [works, joined] : {Case{false, false}, Case{true, false}, Case{true, true}}) {
    ok(extra_.beginCapture(stream_, kModeGlobal));
    ok(api_.eventRecord(event_, stream_));
    ok(api_.streamWaitEvent(other_, event_, 0));
    if (works) {
      fill(7, other_);
    }
    if (joined) {
      ok(api_.eventRecord(event_, other_));
      ok(api_.streamWaitEvent(stream_, event_, 0));
    }
    void* graph = nullptr;
    EXPECT_EQ(extra_.endCapture(stream_, &graph),
              works && !joined ? kCaptureUnjoined : cuda::kSuccess);
    int status = -1;
    ok(api_.streamIsCapturing(other_, &status));
    EXPECT_EQ(status, cuda::kCaptureNone);
    if (graph != nullptr) {
      ok(extra_.destroyGraph(graph));
    }
  }
}

// Copies on a stream of one's own are none of the capture's business.
TEST_F(CudaContract, OtherStreamsWorkDuringACapture) {
  fill(8, other_);
  ok(extra_.beginCapture(stream_, kModeGlobal));
  ok(api_.memcpyDtoHAsync(host_.data(), device_, kBytes, other_));
  int mode = cuda::kCaptureModeRelaxed;
  ok(api_.threadExchangeCaptureMode(&mode));
  ok(api_.streamSynchronize(other_));
  ok(api_.threadExchangeCaptureMode(&mode));
  void* graph = nullptr;
  ok(extra_.endCapture(stream_, &graph));
  ok(extra_.destroyGraph(graph));
  EXPECT_TRUE(hostIsAll(8));
}

TEST_F(CudaContract, WaitingForACapturingStreamBreaksTheCapture) {
  ok(extra_.beginCapture(stream_, kModeGlobal));
  EXPECT_EQ(api_.streamSynchronize(stream_), kCaptureUnsupported);
  void* graph = nullptr;
  EXPECT_EQ(extra_.endCapture(stream_, &graph), kCaptureInvalidated);
}

// Why completion has to be readable without a CUDA call: a look at an event, even of another
// stream, can break a capture.
TEST_F(CudaContract, AskingForAnEventDuringAGlobalCaptureIsUnsafe) {
  ok(api_.eventRecord(event_, other_));
  ok(api_.streamSynchronize(other_));
  ok(extra_.beginCapture(stream_, kModeGlobal));
  cuda::Result asked = cuda::kSuccess;
  std::thread([&] {
    ok(api_.ctxSetCurrent(context_));
    asked = api_.eventQuery(event_);
  }).join();
  void* graph = nullptr;
  const cuda::Result ended = extra_.endCapture(stream_, &graph);
  if (graph != nullptr) {
    ok(extra_.destroyGraph(graph));
  }
  EXPECT_EQ(asked, kCaptureUnsupported);
  EXPECT_EQ(ended, kCaptureInvalidated);
}

TEST_F(CudaContract, AnEventOfACaptureCannotBeAsked) {
  ok(extra_.beginCapture(stream_, kModeGlobal));
  ok(api_.eventRecord(event_, stream_));
  int mode = cuda::kCaptureModeRelaxed;
  ok(api_.threadExchangeCaptureMode(&mode));
  EXPECT_EQ(api_.eventQuery(event_), kCapturedEvent);
  ok(api_.threadExchangeCaptureMode(&mode));
  void* graph = nullptr;
  extra_.endCapture(stream_, &graph);
  if (graph != nullptr) {
    ok(extra_.destroyGraph(graph));
  }
}

TEST_F(CudaContract, EventsKeepTimes) {
  constexpr int kNoTime = 400;  // such an event is no handle here
  cuda::Event begin = nullptr;
  cuda::Event end = nullptr;
  ok(api_.eventCreate(&begin, cuda::kEventTiming));
  ok(api_.eventCreate(&end, cuda::kEventTiming));
  ok(api_.eventRecord(begin, stream_));
  const auto enqueued = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) {
    ok(api_.memcpyHtoDAsync(device_, host_.data(), kBytes, stream_));
  }
  ok(api_.eventRecord(end, stream_));
  ok(api_.streamSynchronize(stream_));
  const std::chrono::duration<double, std::milli> taken =
      std::chrono::steady_clock::now() - enqueued;
  float ms = 0;
  ok(api_.eventElapsedTime(&ms, begin, end));
  EXPECT_GT(ms, 0);
  EXPECT_LE(ms, taken.count() + 5);
  ok(api_.eventRecord(event_, stream_));  // one that keeps none
  ok(api_.streamSynchronize(stream_));
  EXPECT_EQ(api_.eventElapsedTime(&ms, begin, event_), kNoTime);
  ok(api_.eventDestroy(begin));
  ok(api_.eventDestroy(end));
}

// As the copy thread asks for marks while a stream that it knows nothing of is captured.
TEST_F(CudaContract, AThreadThatIsRelaxedMayAskForAnEventDuringAGlobalCapture) {
  cuda::Event begin = nullptr;
  ok(api_.eventCreate(&begin, cuda::kEventTiming));
  ok(api_.eventRecord(begin, other_));
  ok(api_.streamSynchronize(other_));
  ok(extra_.beginCapture(stream_, kModeGlobal));
  std::thread([&] {
    ok(api_.ctxSetCurrent(context_));
    int mode = cuda::kCaptureModeRelaxed;
    ok(api_.threadExchangeCaptureMode(&mode));
    ok(api_.eventQuery(begin));
    float ms = 0;
    ok(api_.eventElapsedTime(&ms, begin, begin));
    ok(api_.threadExchangeCaptureMode(&mode));
  }).join();
  fill(1, stream_);
  void* graph = nullptr;
  ok(extra_.endCapture(stream_, &graph));
  ok(extra_.destroyGraph(graph));
  ok(api_.eventDestroy(begin));
}

TEST_F(CudaContract, OnlyRetainedDevicesHaveAContext) {
  for (int device = 0; device < api_.devices; ++device) {
    unsigned flags = 0;
    int active = -1;
    ok(api_.devicePrimaryCtxGetState(device, &flags, &active));
    EXPECT_EQ(active, device == 0 ? 1 : 0) << "device " << device;
  }
}

TEST_F(CudaContract, ACopyFromWhatIsNoDeviceMemoryIsRefused) {
  std::array<char, 64> stranger{};
  EXPECT_NE(api_.memcpyDtoHAsync(host_.data(), 0x10, stranger.size(), stream_), cuda::kSuccess);
}

// A module that the driver compiles from PTX: each thread writes one word.
TEST_F(CudaContract, AKernelOfPtxRunsWithTheArgumentsOfTheCall) {
  constexpr int kInvalidPtx = 218;
  constexpr int kNotFound = 500;
  const std::string head = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry write";
  const std::string text = head + R"((.param .u64 p_to, .param .u32 p_value)
{
  .reg .b32 %value, %thread;
  .reg .b64 %to, %offset;
  ld.param.u64 %to, [p_to];
  ld.param.u32 %value, [p_value];
  cvta.to.global.u64 %to, %to;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %offset, %thread, 4;
  add.u64 %to, %to, %offset;
  add.u32 %value, %value, %thread;
  st.global.u32 [%to], %value;
  ret;
}
)";
  cuda::Module module = nullptr;
  cuda::Function function = nullptr;
  EXPECT_EQ(api_.moduleLoadData(&module, (head + "() { no.such.u32 %a; }").c_str()), kInvalidPtx);
  ok(api_.moduleLoadData(&module, text.c_str()));
  EXPECT_EQ(api_.moduleGetFunction(&function, module, "absent"), kNotFound);
  ok(api_.moduleGetFunction(&function, module, "write"));
  fill(0, stream_);
  cuda::Pointer to = device_;
  uint32_t value = 40;
  std::array<void*, 2> arguments = {&to, &value};
  ok(api_.launchKernel(function, 1, 1, 1, 3, 1, 1, 0, stream_, arguments.data(), nullptr));
  to = 0;  // was read by the call
  value = 0;
  ok(api_.memcpyDtoHAsync(host_.data(), device_, kBytes, stream_));
  ok(api_.streamSynchronize(stream_));
  ok(api_.moduleUnload(module));
  std::array<uint32_t, 4> words{};
  std::memcpy(words.data(), host_.data(), sizeof(words));
  EXPECT_EQ(words, (std::array<uint32_t, 4>{40, 41, 42, 0}));
}

}  // namespace
}  // namespace reft
