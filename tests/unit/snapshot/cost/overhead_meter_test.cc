#include "snapshot/cost/overhead_meter.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "snapshot/cost/control_steps.h"

namespace reft {
namespace overhead_meter_test {

constexpr int64_t kMs = 1'000'000;

// Deterministic noise in -1..1.
double wobble(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull;
  i ^= i >> 29;
  return static_cast<double>(i * 0xBF58476D1CE4E5B9ull >> 40) / static_cast<double>(1 << 23) - 1;
}

// A meter with the steps that it is told of.
struct Measured {
  explicit Measured(uint32_t control_every) : control(control_every) { control.beginAt(kWarmUp); }
  // Runs `count` steps, each with a snapshot.
  void run(int count, const std::function<int64_t(int step, bool beside_copy)>& length) {
    for (int i = 0; i < count; ++i, ++at) {
      const bool beside_copy = !control.drawn(at);
      meter.step(control.block(at), length(i, beside_copy), beside_copy);
    }
  }
  const Overhead& overhead() const { return meter.overhead(); }

  static constexpr int64_t kWarmUp = 3;
  ControlSteps control;
  OverheadMeter meter;
  int64_t at = 0;
};

TEST(OverheadMeter, MeasuresWhatCopiesAdd) {
  Measured meter(64);
  EXPECT_FALSE(meter.overhead().known);
  meter.run(2000, [](int i, bool beside_copy) {
    return static_cast<int64_t>(10.0 * kMs * (beside_copy ? 1.03 : 1.0) * (1 + 0.01 * wobble(i)));
  });
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_NEAR(static_cast<double>(meter.overhead().ppm), 30'000, 8'000);
  EXPECT_GT(meter.overhead().noise_ppm, 0);
  EXPECT_LE(std::abs(meter.overhead().ppm - 30'000), 2 * meter.overhead().noise_ppm);
  EXPECT_NEAR(static_cast<double>(meter.overhead().step_ns), 10.0 * kMs, 0.2 * kMs);
}

TEST(OverheadMeter, DriftAndOddStepsAreNoOverhead) {
  Measured meter(32);
  meter.run(3000, [](int i, bool) {
    const double drift = 1 + i / 1000.0;          // four times as long at the end
    const double odd = i % 25 == 24 ? 6.0 : 1.0;  // an evaluation
    return static_cast<int64_t>(5.0 * kMs * drift * odd * (1 + 0.01 * wobble(i)));
  });
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_LT(std::abs(meter.overhead().ppm), 10'000);
}

TEST(OverheadMeter, SaysNothingBeforeThereIsEnough) {
  Measured meter(64);
  meter.run(3 + 5 * 8, [](int, bool) { return kMs; });
  EXPECT_FALSE(meter.overhead().known);
  meter.run(1, [](int, bool) { return kMs; });  // the fifth block is over
  EXPECT_TRUE(meter.overhead().known);
  EXPECT_EQ(meter.overhead().ppm, 0);
}

TEST(OverheadMeter, WithoutBothKindsNothingIsKnown) {
  Measured every(1);
  every.run(503, [](int, bool) { return kMs; });
  EXPECT_FALSE(every.overhead().known);
  Measured none(0);
  none.run(500, [](int, bool) { return kMs; });
  EXPECT_FALSE(none.overhead().known);
}

TEST(OverheadMeter, StepsThatHaveNoSnapshotAnywayServeAsControl) {
  ControlSteps control(64);
  control.beginAt(0);
  OverheadMeter meter;
  for (int i = 0; i < 4000; ++i) {
    const bool beside_copy = i % 64 == 0;  // short blocks are continued until they have one
    meter.step(control.block(i), beside_copy ? 12 * kMs : 10 * kMs, beside_copy);
  }
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_EQ(meter.overhead().ppm, 200'000);
}

TEST(OverheadMeter, StartsAnewAndKeepsWhatWasKnownMeanwhile) {
  Measured meter(16);
  const auto cost = [](double factor) {
    return [factor](int, bool beside_copy) {
      return static_cast<int64_t>(10 * kMs * (beside_copy ? factor : 1.0));
    };
  };
  meter.run(400, cost(1.5));
  EXPECT_EQ(meter.overhead().ppm, 500'000);
  meter.control.beginAt(meter.at);
  meter.meter.restart(meter.control.block(meter.at));
  EXPECT_TRUE(meter.overhead().known);
  meter.run(60, cost(1.1));
  EXPECT_EQ(meter.overhead().ppm, 100'000);
}

TEST(OverheadMeter, WhatWasForgottenIsToldAsUnknown) {
  OverheadMeter meter;
  for (uint64_t block = 1; block < 9; ++block) {
    meter.step(block, 11 * kMs, true);
    meter.step(block, 10 * kMs, false);
  }
  ASSERT_TRUE(meter.overhead().known);
  const uint64_t before = meter.blocks();
  meter.forget();
  EXPECT_FALSE(meter.overhead().known);
  EXPECT_NE(meter.blocks(), before) << "so that it is told";
}

// Those of a device are told some steps late.
TEST(OverheadMeter, StepsFromBeforeARestartDoNotCountAfterIt) {
  OverheadMeter meter;
  meter.restart(9);
  for (uint64_t block = 1; block < 9; ++block) {
    meter.step(block, 30 * kMs, true);
    meter.step(block, 10 * kMs, false);
  }
  EXPECT_EQ(meter.blocks(), 0u);
  for (uint64_t block = 9; block < 15; ++block) {
    meter.step(block, 11 * kMs, true);
    meter.step(block, 10 * kMs, false);
  }
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_EQ(meter.overhead().ppm, 100'000);
}

}  // namespace overhead_meter_test
}  // namespace reft
