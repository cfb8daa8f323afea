#include "snapshot/overhead_meter.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <vector>

namespace reft {
namespace {

constexpr int64_t kMs = 1'000'000;

// Deterministic noise in -1..1.
double wobble(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull;
  i ^= i >> 29;
  return static_cast<double>(i * 0xBF58476D1CE4E5B9ull >> 40) / static_cast<double>(1 << 23) - 1;
}

// Runs `steps` steps, each with a snapshot; returns how many were control steps.
int run(OverheadMeter& meter, int steps, const std::function<int64_t(int step, bool beside_copy)>& length) {
  int controls = 0;
  for (int i = 0; i < steps; ++i) {
    const bool control = meter.drawn();
    controls += control ? 1 : 0;
    meter.step(length(i, !control), !control);
  }
  return controls;
}

TEST(OverheadMeter, MeasuresWhatCopiesAdd) {
  OverheadMeter meter(64);
  EXPECT_FALSE(meter.overhead().known);
  run(meter, 2000, [](int i, bool beside_copy) {
    return static_cast<int64_t>(10.0 * kMs * (beside_copy ? 1.03 : 1.0) * (1 + 0.01 * wobble(i)));
  });
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_NEAR(static_cast<double>(meter.overhead().ppm), 30'000, 8'000);
  EXPECT_GT(meter.overhead().noise_ppm, 0);
  EXPECT_LE(std::abs(meter.overhead().ppm - 30'000), 2 * meter.overhead().noise_ppm);
  EXPECT_NEAR(static_cast<double>(meter.overhead().step_ns), 10.0 * kMs, 0.2 * kMs);
}

TEST(OverheadMeter, OneControlStepInEachBlockAndNotAlwaysTheSameOne) {
  OverheadMeter meter(16);
  std::set<int> places;
  std::vector<int> at;
  int controls = 0;
  for (int i = 0; i < 16 * 40; ++i) {
    if (meter.drawn()) {
      ++controls;
      at.push_back(i);
      places.insert(i % 16);
    }
    meter.step(kMs, !meter.drawn());
  }
  EXPECT_GE(controls, 39);
  EXPECT_LE(controls, 39 + 12);  // short blocks at first
  EXPECT_GT(places.size(), 8u);
}

TEST(OverheadMeter, AllRanksDrawTheSameSteps) {
  OverheadMeter a(32);
  OverheadMeter b(32);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(a.drawn(), b.drawn()) << i;
    a.step(kMs + i, !a.drawn());
    b.step(3 * kMs, !b.drawn());
  }
}

TEST(OverheadMeter, DriftAndOddStepsAreNoOverhead) {
  OverheadMeter meter(32);
  run(meter, 3000, [](int i, bool) {
    const double drift = 1 + i / 1000.0;          // four times as long at the end
    const double odd = i % 25 == 24 ? 6.0 : 1.0;  // an evaluation
    return static_cast<int64_t>(5.0 * kMs * drift * odd * (1 + 0.01 * wobble(i)));
  });
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_LT(std::abs(meter.overhead().ppm), 10'000);
}

TEST(OverheadMeter, SaysNothingBeforeThereIsEnough) {
  OverheadMeter meter(64);
  run(meter, 3 + 4 * 8, [](int, bool) { return kMs; });
  EXPECT_FALSE(meter.overhead().known);
  run(meter, 8, [](int, bool) { return kMs; });
  EXPECT_TRUE(meter.overhead().known);
  EXPECT_EQ(meter.overhead().ppm, 0);
}

TEST(OverheadMeter, WithoutBothKindsNothingIsKnown) {
  OverheadMeter every(1);
  EXPECT_EQ(run(every, 503, [](int, bool) { return kMs; }), 500);  // all but the warm-up
  EXPECT_FALSE(every.overhead().known);
  OverheadMeter none(0);
  EXPECT_EQ(run(none, 500, [](int, bool) { return kMs; }), 0);
  EXPECT_FALSE(none.overhead().known);
}

TEST(OverheadMeter, StepsThatHaveNoSnapshotAnywayServeAsControl) {
  OverheadMeter meter(64);
  for (int i = 0; i < 4000; ++i) {
    const bool beside_copy = i % 64 == 0;  // blocks grow until they have one
    meter.step(beside_copy ? 12 * kMs : 10 * kMs, beside_copy);
  }
  ASSERT_TRUE(meter.overhead().known);
  EXPECT_EQ(meter.overhead().ppm, 200'000);
}

TEST(OverheadMeter, StartsAnewAndKeepsWhatWasKnownMeanwhile) {
  OverheadMeter meter(16);
  const auto cost = [](double factor) {
    return [factor](int, bool beside_copy) { return static_cast<int64_t>(10 * kMs * (beside_copy ? factor : 1.0)); };
  };
  run(meter, 400, cost(1.5));
  EXPECT_EQ(meter.overhead().ppm, 500'000);
  meter.restart();
  EXPECT_TRUE(meter.overhead().known);
  run(meter, 60, cost(1.1));
  EXPECT_EQ(meter.overhead().ppm, 100'000);
}

}  // namespace
}  // namespace reft
