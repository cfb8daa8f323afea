// What is counted and told of driver calls, and that the calls themselves are as without the
// library.
#include <pthread.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <latch>
#include <thread>
#include <vector>

#include "tests/unit/preload/support.h"

namespace {
std::atomic<bool> coarse_clock_fails{false};
}  // namespace

// Of the whole program: the preloaded library calls this one, too.
extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  if (clock == CLOCK_MONOTONIC_COARSE && coarse_clock_fails.load()) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_clock_gettime, clock, now));
}

namespace reft::preload_test {
namespace {

const StaticRuntime& runtime() {
  return staticRuntime("libruntime_a.so", StaticRuntime::kLegacy);
}

// Looks until it holds; the deadline is only met by a failure.
bool comesTrue(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

TEST(Observation, CountsEachKindOfCall) {
  void* const work = kernel("kinds");
  const FakeCuda& cuda = FakeCuda::instance();
  cuda::Event event = nullptr;
  ASSERT_EQ(cuda.api.eventCreate(&event, cuda::kEventDisableTiming), 0);
  cuda::Pointer memory = 0;
  ASSERT_EQ(cuda.memAlloc(&memory, 64), 0);
  char bytes[64] = "copied";
  char back[64] = "";

  const Counted counted;
  EXPECT_EQ(runtime().launch(work), 0);
  EXPECT_EQ(runtime().memcpyHtoDAsync(memory, bytes, sizeof(bytes), nullptr), 0);
  EXPECT_EQ(runtime().memcpyDtoHAsync(back, memory, sizeof(back), nullptr), 0);
  EXPECT_EQ(cuda.memsetD8(memory, 1, sizeof(bytes), nullptr), 0);
  EXPECT_EQ(runtime().eventRecord(event, nullptr), 0);
  EXPECT_EQ(runtime().eventRecordWithFlags(event, nullptr, 0), 0);
  EXPECT_EQ(runtime().eventSynchronize(event), 0);
  EXPECT_EQ(runtime().streamSynchronize(nullptr), 0);
  EXPECT_STREQ(back, "copied");
  EXPECT_EQ(counted(CallKind::kLaunch), 1u);
  EXPECT_EQ(counted(CallKind::kCopy), 2u);
  EXPECT_EQ(counted(CallKind::kFill), 1u);
  EXPECT_EQ(counted(CallKind::kEventRecord), 2u);
  EXPECT_EQ(counted(CallKind::kEventSync), 1u);
  EXPECT_EQ(counted(CallKind::kStreamSync), 1u);
  EXPECT_EQ(counted.all(), 8u);
  EXPECT_EQ(readDeviceActivity().in_call.size(), 0u);
}

TEST(Observation, NamesTheNewestKernel) {
  runtime().launch(kernel("first_kernel"));
  runtime().launch(kernel("_Z13second_kernelPf"));
  runtime().streamSynchronize(nullptr);
  const auto newest = readDeviceActivity().launch;
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->thread, ::gettid());
  EXPECT_STREQ(nameOf(newest->call), "cuLaunchKernel");
  EXPECT_EQ(nameOfKernel(*newest), "_Z13second_kernelPf");
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ns = now.tv_sec * 1'000'000'000LL + now.tv_nsec;
  EXPECT_LE(newest->at_ns, now_ns);
  EXPECT_GT(newest->at_ns, now_ns - 60'000'000'000LL);
}

TEST(Observation, DoesNotAskForTheNameOfWhatMayBeUnloaded) {
  runtime().launch(kernel("unloaded"));
  const auto newest = readDeviceActivity().launch;
  ASSERT_TRUE(newest);
  EXPECT_EQ(nameOfKernel(*newest), "unloaded");
  const FakeCuda& cuda = FakeCuda::instance();
  EXPECT_NE(cuda.api.moduleUnload(nullptr), 0);
  const uint64_t asked = cuda.calls("cuFuncGetName");
  EXPECT_EQ(nameOfKernel(*newest), std::nullopt);
  EXPECT_EQ(cuda.calls("cuFuncGetName"), asked);
}

// Launches before and after differ in their times.
void passTick() {
  const auto tick = [] {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return now.tv_nsec;
  };
  const long before = tick();
  EXPECT_TRUE(comesTrue([&] { return tick() != before; }));
}

TEST(Observation, ShowsTheThreadThatWaits) {
  const FakeCuda& cuda = FakeCuda::instance();
  void* const work = kernel("stuck");
  cuda::Context context = nullptr;
  cuda.api.ctxGetCurrent(&context);
  cuda.hold(1);
  passTick();
  std::atomic<pid_t> thread{0};
  std::thread waiting([&] {
    cuda.api.ctxSetCurrent(context);
    runtime().launch(work);
    thread = ::gettid();
    runtime().streamSynchronize(nullptr);
  });
  DeviceActivity activity;
  const bool waits = comesTrue([&] {
    activity = readDeviceActivity();
    return !activity.in_call.empty() && activity.in_call[0].call == DriverCall::cuStreamSynchronize;
  });
  cuda.hold(0);
  waiting.join();
  ASSERT_TRUE(waits);
  ASSERT_EQ(activity.in_call.size(), 1u);
  EXPECT_EQ(activity.in_call[0].thread, thread.load());
  EXPECT_STREQ(nameOf(activity.in_call[0].call), "cuStreamSynchronize");
  ASSERT_TRUE(activity.launch);
  EXPECT_EQ(activity.launch->kernel, reinterpret_cast<uint64_t>(work));
  EXPECT_LE(activity.launch->at_ns, activity.in_call[0].since_ns);
  EXPECT_TRUE(readDeviceActivity().in_call.empty());
}

TEST(Observation, ACallInsideACallIsTheDriversOwn) {
  const auto launch = find<int (*)(void*, void*)>(openHelper("liblinked_user.so"), "cuGraphLaunch");
  void* const work = kernel("nested");
  const FakeCuda& cuda = FakeCuda::instance();
  const Counted counted;
  const uint64_t before = cuda.calls("cuLaunchKernel");
  EXPECT_EQ(launch(work, nullptr), 0);
  EXPECT_EQ(cuda.calls("cuLaunchKernel"), before + 2);
  EXPECT_EQ(counted(CallKind::kGraphLaunch), 1u);
  EXPECT_EQ(counted.all(), 1u);
}

TEST(Observation, AddsNoCallToACapture) {
  const FakeCuda& cuda = FakeCuda::instance();
  void* const work = kernel("captured");
  cuda::Stream stream = nullptr;
  ASSERT_EQ(cuda.api.streamCreate(&stream, cuda::kStreamNonBlocking, 0), 0);
  constexpr const char* kCalls[] = {
      "cuEventCreate", "cuEventRecord",           "cuEventQuery",
      "cuStreamQuery", "cuStreamSynchronize",     "cuStreamIsCapturing",
      "cuFuncGetName", "cuStreamWriteValue32_v2", "cuCtxGetCurrent"};
  std::vector<uint64_t> before;
  for (const char* call : kCalls) {
    before.push_back(cuda.calls(call));
  }
  const Counted counted;
  void* graph = nullptr;
  ASSERT_EQ(cuda.beginCapture(stream, 0), 0);
  EXPECT_EQ(runtime().launch(work, stream), 0);
  EXPECT_EQ(readDeviceActivity().state, DeviceActivity::kArmed);
  EXPECT_EQ(runtime().launch(work, stream), 0);
  ASSERT_EQ(cuda.endCapture(stream, &graph), 0);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(cuda.calls(kCalls[i]), before[i]) << kCalls[i];
  }
  void* executable = nullptr;
  ASSERT_EQ(
      find<int (*)(void**, void*, uint64_t)>(::dlopen("libcuda.so.1", RTLD_LAZY),
                                             "cuGraphInstantiateWithFlags")(&executable, graph, 0),
      0);
  EXPECT_EQ(runtime().graphLaunch(executable, stream), 0);
  EXPECT_EQ(runtime().streamSynchronize(stream), 0);
  EXPECT_EQ(counted(CallKind::kLaunch), 2u);
  EXPECT_EQ(counted(CallKind::kGraphLaunch), 1u);
}

TEST(Observation, ResultsAndErrnoAreThoseOfTheDriver) {
  const FakeCuda& cuda = FakeCuda::instance();
  void* const work = kernel("failing");
  cuda.fail("cuLaunchKernel", 1, 98, 0);
  EXPECT_EQ(runtime().launch(work), 98);
  EXPECT_EQ(runtime().launch(work), 0);
  std::thread([&] {  // its first call also looks for a slot
    kernel("errno");
    errno = E2BIG;
    EXPECT_EQ(runtime().eventRecord(nullptr, nullptr), 400);
    EXPECT_EQ(errno, E2BIG);
  })
      .join();
}

TEST(Observation, TheFirstErrorThatLastsIsKept) {
  const FakeCuda& cuda = FakeCuda::instance();
  void* const work = kernel("lost");
  cuda.fail("cuLaunchKernel", 1, 1, 0);  // of one call
  EXPECT_EQ(runtime().launch(work), 1);
  EXPECT_EQ(readDeviceActivity().error.code, 0);
  cuda.fail("cuLaunchKernel", 1, 700, 0);
  EXPECT_EQ(runtime().launch(work), 700);
  cuda.fail("cuLaunchKernel", 1, 719, 0);
  EXPECT_EQ(runtime().launch(work), 719);
  EXPECT_EQ(readDeviceActivity().error.code, 700);
  EXPECT_GT(readDeviceActivity().error.at_ns, 0);
}

TEST(Observation, SlotsOutliveTheirThreads) {
  void* const work = kernel("threads");
  const Counted counted;
  const uint64_t untracked = readDeviceActivity().untracked;
  cuda::Context context = nullptr;
  FakeCuda::instance().api.ctxGetCurrent(&context);
  constexpr int kThreads = 3 * ActivityTable::kSlots;
  for (int i = 0; i < kThreads; ++i) {
    std::thread([&] {
      FakeCuda::instance().api.ctxSetCurrent(context);
      runtime().launch(work);
    }).join();
  }
  EXPECT_EQ(counted(CallKind::kLaunch), static_cast<uint64_t>(kThreads));
  EXPECT_EQ(readDeviceActivity().untracked, untracked);
}

TEST(Observation, CountsThreadsThatFindNoSlot) {
  void* const work = kernel("crowd");
  const Counted counted;
  cuda::Context context = nullptr;
  FakeCuda::instance().api.ctxGetCurrent(&context);
  constexpr int kThreads = ActivityTable::kSlots + 40;
  constexpr int kLaunches = 50;
  std::latch all(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      FakeCuda::instance().api.ctxSetCurrent(context);
      for (int launch = 0; launch < kLaunches; ++launch) {
        EXPECT_EQ(runtime().launch(work), 0);
      }
      all.arrive_and_wait();  // none gives its slot back before
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(counted(CallKind::kLaunch), static_cast<uint64_t>(kThreads * kLaunches));
  EXPECT_GT(readDeviceActivity().untracked, 0u);
}

TEST(Observation, AThreadMayLaunchWhileItEnds) {
  void* const work = kernel("ending");
  static cuda::Context context = nullptr;
  FakeCuda::instance().api.ctxGetCurrent(&context);
  const Counted counted;
  pthread_key_t key;
  ASSERT_EQ(::pthread_key_create(&key, [](void* kernel) { runtime().launch(kernel); }), 0);
  std::thread([&] {
    FakeCuda::instance().api.ctxSetCurrent(context);
    runtime().launch(work);
    ::pthread_setspecific(key, work);
  }).join();
  EXPECT_EQ(counted(CallKind::kLaunch), 2u);
  ::pthread_key_delete(key);
}

TEST(Observation, AForkedChildCountsItsOwn) {
  void* const work = kernel("fork");
  runtime().launch(work);
  runtime().streamSynchronize(nullptr);
  EXPECT_TRUE(holdsInChild([&] {
    EXPECT_EQ(readDeviceActivity().count(CallKind::kLaunch), 0u);
    EXPECT_FALSE(readDeviceActivity().launch);
    EXPECT_EQ(runtime().eventRecord(nullptr, nullptr), 400);
    EXPECT_EQ(readDeviceActivity().count(CallKind::kEventRecord), 1u);
  }));
  EXPECT_GE(readDeviceActivity().count(CallKind::kLaunch), 1u);
}

TEST(Observation, ChildrenThatRunOtherProgramsEndWell) {
  runtime().launch(kernel("children"));
  const Counted counted;
  for (int i = 0; i < 50; ++i) {
    pid_t child =
        0;  // posix_spawn shares the memory of the parent until the child runs its program
    char program[] = "/bin/true";
    char* const words[] = {program, nullptr};
    ASSERT_EQ(::posix_spawn(&child, program, nullptr, nullptr, words, environ), 0);
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(counted.all(), 0u);
}

TEST(Observation, DisarmsItselfWhenItsClockFails) {
  void* const work = kernel("clock");
  const StaticRuntime armed = runtime();
  armed.launch(work);
  EXPECT_TRUE(holdsInChild([&] {
    coarse_clock_fails = true;
    EXPECT_EQ(armed.eventRecord(nullptr, nullptr), 400);
    coarse_clock_fails = false;
    EXPECT_EQ(readDeviceActivity().state, DeviceActivity::kDisarmed);
    EXPECT_EQ(armed.eventRecord(nullptr, nullptr), 400);  // and it stays so
    EXPECT_EQ(readDeviceActivity().count(CallKind::kEventRecord), 0u);
    void* function = nullptr;  // what is looked up now is the driver's
    ASSERT_EQ(armed.getProcAddress("cuEventSynchronize", &function, 2000, 1, nullptr), 0);
    EXPECT_NE(function, reinterpret_cast<void*>(armed.eventSynchronize));
  }));
}

}  // namespace
}  // namespace reft::preload_test
