// The placement behind the waits of a device, over a driver whose events are passed when the test says so: no thread, no clock.
#include "snapshot/device_placement.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <vector>

namespace reft {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kChunk = 1000;
constexpr uint64_t kBytes = 40 * kChunk;

// A driver with one stream that trains. Recording an event gives it the time at which the device will come to it.
struct Script {
  int64_t enqueued_ns = 0;  // where on the device's clock the stream ends by now
  int64_t device_ns = 0;    // how far the device is
  std::map<cuda::Event, int64_t> times;
  uintptr_t events = 0;
  int recorded = 0;
  bool capturing = false;
  bool broken = false;
};
Script* g_script = nullptr;

CudaApi scriptedDriver() {
  CudaApi api;
  api.devices = 1;
  api.ctxGetCurrent = [](cuda::Context* context) { return *context = nullptr, cuda::kSuccess; };
  api.ctxSetCurrent = [](cuda::Context) { return cuda::kSuccess; };
  api.ctxGetStreamPriorityRange = [](int* lowest, int* highest) { return *lowest = *highest = 0, cuda::kSuccess; };
  api.devicePrimaryCtxRetain = [](cuda::Context* context, cuda::Device) { return *context = g_script, cuda::kSuccess; };
  api.devicePrimaryCtxRelease = [](cuda::Device) { return cuda::kSuccess; };
  api.memHostRegister = [](void*, size_t, unsigned) { return cuda::kSuccess; };
  api.memHostUnregister = [](void*) { return cuda::kSuccess; };
  api.memHostGetDevicePointer = [](cuda::Pointer* at, void*, unsigned) { return *at = 1, cuda::kSuccess; };
  api.streamCreate = [](cuda::Stream* stream, unsigned, int) { return *stream = g_script, cuda::kSuccess; };
  api.streamDestroy = [](cuda::Stream) { return cuda::kSuccess; };
  api.streamQuery = [](cuda::Stream) { return cuda::kSuccess; };
  api.streamIsCapturing = [](cuda::Stream, int* status) {
    return *status = g_script->capturing ? 1 : 0, cuda::kSuccess;
  };
  api.threadExchangeCaptureMode = [](int*) { return cuda::kSuccess; };
  api.eventCreate = [](cuda::Event* event, unsigned) {
    return *event = reinterpret_cast<cuda::Event>(++g_script->events), cuda::kSuccess;
  };
  api.eventDestroy = [](cuda::Event) { return cuda::kSuccess; };
  api.eventRecord = [](cuda::Event event, cuda::Stream) {
    g_script->times[event] = g_script->enqueued_ns;
    ++g_script->recorded;
    return cuda::kSuccess;
  };
  api.eventQuery = [](cuda::Event event) {
    return g_script->broken ? 700 : g_script->times.at(event) <= g_script->device_ns ? cuda::kSuccess : cuda::kNotReady;
  };
  api.eventElapsedTime = [](float* ms, cuda::Event begin, cuda::Event end) {
    *ms = static_cast<float>(static_cast<double>(g_script->times.at(end) - g_script->times.at(begin)) / 1e6);
    return cuda::kSuccess;
  };
  return api;
}

// A step of 30 ms: 5 of work, a wait of 10 for a message, 5 of work, a wait of 6, 4 of work; the copy rate is 1 chunk per 0.2 ms.
class DevicePlacementTest : public testing::Test {
 protected:
  DevicePlacementTest() { g_script = &script_; }

  void mark(OpEvent::What what, uint32_t peer = 0) {
    waits_.mark({.what = what, .kind = OpKind::kRecv, .peer = static_cast<int32_t>(peer), .bytes = 64}, kStream);
  }
  struct Given {
    uint64_t bytes;
    Tier tier;
    std::optional<int64_t> behind_ns;  // since the step's program point
  };
  // What would be ordered, with the copies made where they are ordered.
  std::vector<Given> take(int64_t step) {
    std::vector<Given> given;
    while (const auto order = placement_->next(step)) {
      const int64_t from = order->behind ? script_.times.at(placement_->event(*order->behind)) : point_ns_;
      given.push_back(
          {order->bytes, order->tier, order->behind ? std::optional<int64_t>(from - point_ns_) : std::nullopt});
      const auto end = placement_->takeMark();
      ASSERT_OR_THROW(end.has_value());
      copied_until_ns_ = std::max(copied_until_ns_, from) + static_cast<int64_t>(order->bytes / kChunk) * kMs / 5;
      script_.times[placement_->event(*end)] = copied_until_ns_;
      placement_->ordered(*order, order->bytes, end);
    }
    return given;
  }
  static void ASSERT_OR_THROW(bool holds) {
    if (!holds) {
      throw std::runtime_error("no event is left");
    }
  }
  std::vector<Given> step(int64_t number, int64_t first_wait_ns = 10 * kMs, uint64_t bytes = kBytes) {
    point_ns_ = script_.enqueued_ns;
    EXPECT_TRUE(placement_->begin(kStream, number, kChunk, bytes));
    script_.enqueued_ns += 5 * kMs;
    mark(OpEvent::kWaitBegin, 1);
    script_.enqueued_ns += first_wait_ns;
    mark(OpEvent::kWaitEnd, 1);
    script_.enqueued_ns += 5 * kMs;
    mark(OpEvent::kWaitBegin, 2);
    script_.enqueued_ns += 6 * kMs;
    mark(OpEvent::kWaitEnd, 2);
    script_.enqueued_ns += 4 * kMs;
    const auto given = take(number);
    mark(OpEvent::kGate);
    mark(OpEvent::kDone);
    script_.enqueued_ns += kMs / 2;
    return given;
  }
  void deviceComes() {
    script_.device_ns = std::max(script_.enqueued_ns, copied_until_ns_);
    placement_->learn();
  }
  void learnSteps(int64_t count) {
    for (int64_t number = 1; number <= count; ++number) {
      step(number);
      deviceComes();
    }
  }

  static constexpr DeviceStream kStream{0, nullptr};
  Script script_;
  CudaApi api_ = scriptedDriver();
  DeviceWaits waits_;
  DeviceCopy copy_{api_};
  std::optional<DevicePlacement> placement_{std::in_place, copy_, waits_};
  int64_t point_ns_ = 0;
  int64_t copied_until_ns_ = 0;
};

TEST_F(DevicePlacementTest, NothingIsKnownSoEverythingIsOrderedAtOnce) {
  const auto given = step(1);
  ASSERT_EQ(given.size(), 1u);
  EXPECT_EQ(given[0].bytes, kBytes);
  EXPECT_EQ(given[0].tier, Tier::kCompute);
  EXPECT_FALSE(given[0].behind_ns.has_value());
}

TEST_F(DevicePlacementTest, OrdersWhatFitsBehindTheWaits) {
  learnSteps(8);
  const auto given = step(9);  // 40 chunks take 8 of 16 ms
  ASSERT_EQ(given.size(), 2u);
  EXPECT_EQ(given[0].behind_ns, 5 * kMs);
  EXPECT_EQ(given[1].behind_ns, 20 * kMs);
  EXPECT_EQ(given[0].tier, Tier::kGap);
  EXPECT_EQ(given[0].bytes + given[1].bytes, kBytes);
  EXPECT_GT(given[0].bytes, given[1].bytes);  // in proportion to their room
  deviceComes();
  EXPECT_EQ(placement_->longestOverrunNs(), 0);
  EXPECT_LT(placement_->errors().recent_median, 0.1);
}

TEST_F(DevicePlacementTest, WhatDoesNotFitIsOrderedAtOnce) {
  learnSteps(8);
  const auto given = step(9, 10 * kMs, 100 * kChunk);  // 20 ms
  ASSERT_EQ(given.size(), 3u);
  EXPECT_FALSE(given[0].behind_ns.has_value());
  EXPECT_EQ(given[0].tier, Tier::kCompute);
  EXPECT_EQ(given[0].bytes + given[1].bytes + given[2].bytes, 100 * kChunk);
  EXPECT_GE(given[0].bytes, 20 * kChunk);
}

TEST_F(DevicePlacementTest, TheHostMayBeStepsAheadOfTheDevice) {
  learnSteps(8);
  for (int64_t number = 9; number <= 12; ++number) {
    EXPECT_EQ(step(number).size(), 2u);  // by what was learnt before
    placement_->learn();                 // and the device has come to nothing of it
  }
  deviceComes();
  EXPECT_EQ(step(13).size(), 2u);
}

TEST_F(DevicePlacementTest, LearnsAnotherLength) {
  learnSteps(8);
  int64_t number = 9;
  for (; number <= 12; ++number) {
    step(number, 2 * kMs);
    deviceComes();
  }
  const auto given = step(number, 2 * kMs);
  ASSERT_GE(given.size(), 2u);
  for (const Given& one : given) {
    if (one.behind_ns == 5 * kMs) {
      EXPECT_LE(one.bytes, 10 * kChunk);  // what 2 ms hold
    }
  }
}

TEST_F(DevicePlacementTest, AWaitThatDoesNotComeIsNotOrderedBehind) {
  learnSteps(8);
  EXPECT_TRUE(placement_->begin(kStream, 9, kChunk, kBytes));
  script_.enqueued_ns += 5 * kMs;
  mark(OpEvent::kWaitBegin, 1);
  mark(OpEvent::kWaitEnd, 1);
  EXPECT_EQ(take(9).size(), 1u);
  EXPECT_TRUE(placement_->begin(kStream, 10, kChunk, kBytes));
  EXPECT_TRUE(take(9).empty());  // what was not asked for then is the gate's
}

TEST_F(DevicePlacementTest, AStepWithMarksThatWereLostIsNotLearnt) {
  learnSteps(8);
  const uint64_t steps = placement_->errors().steps;
  script_.capturing = true;
  step(9, 1 * kMs);
  script_.capturing = false;
  EXPECT_GT(waits_.lost(), 0u);
  deviceComes();
  for (int64_t number = 10; number <= 11; ++number) {
    step(number);
    deviceComes();
  }
  EXPECT_GT(placement_->errors().steps, steps);
  EXPECT_EQ(step(12).size(), 2u);
}

TEST_F(DevicePlacementTest, AFailedDeviceIsNotAskedAgain) {
  learnSteps(8);
  script_.broken = true;
  step(9);
  script_.device_ns = script_.enqueued_ns;
  placement_->learn();
  EXPECT_FALSE(copy_.usable());
  EXPECT_FALSE(placement_->begin(kStream, 10, kChunk, kBytes));
  EXPECT_FALSE(waits_.watching());
  EXPECT_TRUE(take(10).empty());
}

TEST_F(DevicePlacementTest, NoEventIsLostOverManySteps) {
  for (int64_t number = 1; number <= 3000; ++number) {
    step(number);
    if (number % 7 == 0) {
      deviceComes();
    }
  }
  EXPECT_EQ(waits_.lost(), 0u);
}

TEST_F(DevicePlacementTest, NobodyWatchesAfterItsEnd) {
  learnSteps(3);
  placement_.reset();
  EXPECT_FALSE(waits_.watching());
  const int recorded = script_.recorded;
  mark(OpEvent::kWaitBegin);
  EXPECT_EQ(script_.recorded, recorded);
  // The events are all there again.
  uint32_t taken = 0;
  while (waits_.take().has_value()) {
    ++taken;
  }
  EXPECT_GE(taken, DeviceWaits::kEvents - 1);
}

}  // namespace
}  // namespace reft
