#include "snapshot/device/device_clock.h"

#include <gtest/gtest.h>

#include "tests/fakes/scripted_driver.h"

namespace reft {
namespace device_clock_test {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kAheadNs = 77 * kMs;

class DeviceClockTest : public testing::Test {
 protected:
  DeviceClockTest() {
    EXPECT_TRUE(copy_.follow(marks_, {0, ScriptedDriver::kTraining}));
    clock_.use(0);
  }
  uint32_t at(int64_t device_ns) {
    const uint32_t mark = *marks_.take();
    driver_.times[marks_.event(mark)] = device_ns;
    return mark;
  }
  // The host looks so long after the device has come there.
  std::optional<int64_t> look(uint32_t mark, int64_t late_ns) {
    driver_.device_ns = driver_.times[marks_.event(mark)];
    host_.advance(std::chrono::nanoseconds(driver_.device_ns + kAheadNs + late_ns - host_.nowNs()));
    return clock_.timeOf(mark);
  }

  ScriptedDriver driver_;
  CudaApi api_ = driver_.api();
  DeviceMarks marks_;
  DeviceCopy copy_{api_};
  ManualClock host_;
  DeviceClock clock_{copy_, marks_, host_};
};

TEST_F(DeviceClockTest, CountsFromTheFirstBaseOnAcrossLaterOnes) {
  const uint32_t first = at(1000 * kMs);
  ASSERT_EQ(look(first, 0), 0);
  clock_.rebase(first, 0);
  const uint32_t second = at(1250 * kMs);
  ASSERT_EQ(look(second, 0), 250 * kMs);
  clock_.rebase(second, 250 * kMs);
  EXPECT_EQ(look(at(1300 * kMs), 0), 300 * kMs);
}

TEST_F(DeviceClockTest, WhatTheDeviceHasNotPassedHasNoTime) {
  const uint32_t mark = at(10 * kMs);
  driver_.device_ns = 9 * kMs;
  EXPECT_FALSE(clock_.timeOf(mark).has_value());
  EXPECT_FALSE(clock_.failed());
}

TEST_F(DeviceClockTest, TheQuickestLookOfTheNewestStepsSaysWhatTimeItWasForTheHost) {
  const uint32_t first = at(1000 * kMs);
  ASSERT_EQ(look(first, 9 * kMs), 0);
  EXPECT_EQ(clock_.hostNs(0), 1000 * kMs + kAheadNs + 9 * kMs);
  clock_.rebase(first, 0);
  const auto mark = look(at(1010 * kMs), kMs / 2);
  EXPECT_EQ(clock_.hostNs(*mark), 1010 * kMs + kAheadNs + kMs / 2);
  EXPECT_EQ(clock_.hostNs(0), 1000 * kMs + kAheadNs + kMs / 2) << "also of what was before";
  look(at(1020 * kMs), 30 * kMs);
  EXPECT_EQ(clock_.hostNs(0), 1000 * kMs + kAheadNs + kMs / 2);
}

TEST_F(DeviceClockTest, OldLooksAreForgotten) {
  int64_t base_ns = 0;
  for (int64_t step = 0; step < 40; ++step) {
    const uint32_t mark = at((1000 + 10 * step) * kMs);
    base_ns = *look(mark, step < 10 ? 0 : kMs);  // the clocks have drifted by as much
    clock_.rebase(mark, base_ns);
  }
  const auto mark = look(at(1500 * kMs), kMs);
  EXPECT_EQ(clock_.hostNs(*mark), 1500 * kMs + kAheadNs + kMs);
}

TEST_F(DeviceClockTest, AFailedDriverEndsIt) {
  const uint32_t mark = at(0);
  driver_.broken = true;
  EXPECT_FALSE(look(mark, 0).has_value());
  EXPECT_TRUE(clock_.failed());
  driver_.broken = false;
  EXPECT_FALSE(look(mark, 0).has_value());
}

}  // namespace device_clock_test
}  // namespace reft
