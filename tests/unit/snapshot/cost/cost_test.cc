#include "snapshot/cost/cost.h"

#include <gtest/gtest.h>

#include <vector>

namespace reft {
namespace cost_test {

constexpr int64_t kWorkNs = 10'000'000;
constexpr int64_t kPointNs = 1'000'000;

// A rank whose steps the test times.
class CostTest : public testing::Test {
 protected:
  // Trains up to and including step `last`. A step is longer by `more_ns` beside a copy.
  void train(Cost& cost, int64_t last, int64_t more_ns) {
    for (++step_; step_ <= last; ++step_) {
      cost.beginPoint(step_, now_ns_, {});
      const bool taken = cost.decide(step_, true) == Cadence::Answer::kTake;
      const bool control = taken && cost.wantsControl();
      controls_ += control ? 1 : 0;
      if (taken) {
        cost.beginSnapshot(control);
        cost.committed(step_, cost.proposal());
      }
      now_ns_ += kPointNs;
      cost.endPoint(now_ns_);
      now_ns_ += kWorkNs + (taken && !control ? more_ns - kPointNs : 0);
    }
    --step_;
  }

  int64_t step_ = 0;
  int64_t now_ns_ = 1;
  int controls_ = 0;
};

TEST_F(CostTest, IsUnknownAtFirstAndMeasuredAgainstControlSteps) {
  Cost cost({}, 16);
  EXPECT_FALSE(cost.figures().known);
  train(cost, 200, kWorkNs / 5);
  ASSERT_TRUE(cost.figures().known);
  EXPECT_EQ(cost.figures().overhead_ppm, 200'000);
  EXPECT_EQ(cost.figures().noise_ppm, 0);
  EXPECT_GT(controls_, 10);
}

TEST_F(CostTest, WithoutControlStepsNothingIsMeasured) {
  Cost cost({}, 0);
  train(cost, 200, kWorkNs);
  EXPECT_FALSE(cost.figures().known);
  EXPECT_EQ(controls_, 0);
}

TEST_F(CostTest, AboveTheLimitSnapshotsBecomeRarer) {
  CadenceOptions options;
  options.limit_ppm = 10'000;
  options.decides = true;
  Cost cost(options, 16);
  EXPECT_EQ(cost.every(), 1u);
  train(cost, 300, kWorkNs * 3 / 100);
  EXPECT_EQ(cost.every(), 4u) << "three percent of a step, at most one percent wanted";
  EXPECT_EQ(cost.figures().every, 4u);
}

TEST_F(CostTest, ThePointOfAControlStepIsNoCost) {
  Cost cost({}, 1);
  cost.beginPoint(1, 1'000, {});
  EXPECT_EQ(cost.decide(1, true), Cadence::Answer::kTake);
  EXPECT_FALSE(cost.wantsControl()) << "not among the first steps";
  EXPECT_EQ(cost.pointBegan(), 1'000);
  cost.endPoint(1'500);
  EXPECT_EQ(cost.pointBegan(), std::nullopt);
  EXPECT_EQ(cost.beginPoint(10, 3'000, {}), 2'000);
  cost.decide(10, true);
  EXPECT_TRUE(cost.wantsControl());
  cost.beginSnapshot(true);
  const Cost::Step step = cost.endPoint(3'400);
  EXPECT_FALSE(step.beside_copy);
  EXPECT_EQ(step.point_begin_ns, 3'000);
  EXPECT_EQ(step.point_end_ns, 3'400);
  EXPECT_FALSE(cost.wantsControl()) << "of one point";
}

// The host runs ahead of its device, so its own times say nothing.
TEST_F(CostTest, OnDevicesTheDevicesStepsCount) {
  Cost cost({}, 16);
  train(cost, 1, 0);
  cost.moveToDevices(1);
  EXPECT_TRUE(cost.onDevices());
  train(cost, 400, kWorkNs);
  EXPECT_FALSE(cost.figures().known);
  int64_t begin_ns = 0;
  for (uint64_t block = 1'000'000; block < 1'000'008; ++block) {
    std::vector<DeviceStep> steps;
    for (int i = 0; i < 6; ++i) {
      DeviceStep one;
      one.block = (block << 24);
      one.beside_copy = i != 3;
      one.begin_ns = begin_ns;
      one.gate_begin_ns = one.gate_end_ns = begin_ns + kWorkNs / 2;
      begin_ns += one.beside_copy ? kWorkNs * 11 / 10 : kWorkNs;
      one.end_ns = begin_ns;
      one.gate_begin_ns = one.gate_end_ns = begin_ns - 10;
      steps.push_back(one);
    }
    cost.beginPoint(++step_, now_ns_, steps);
    cost.decide(step_, true);
    cost.endPoint(now_ns_);
  }
  EXPECT_TRUE(cost.figures().known);
  EXPECT_EQ(cost.figures().overhead_ppm, 100'000);
}

TEST_F(CostTest, ReplaysOnDevicesEndTheMeasurement) {
  Cost host({}, 16);
  train(host, 200, kWorkNs / 5);
  host.expectReplays();
  EXPECT_TRUE(host.figures().known) << "a graph on the host's side writes no state there";
  host.moveToDevices(200);
  Cost device({}, 16);
  step_ = 0;
  train(device, 200, kWorkNs / 5);
  device.moveToDevices(200);
  EXPECT_TRUE(device.figures().known) << "until there is something newer";
  device.expectReplays();
  EXPECT_TRUE(device.replays());
  EXPECT_FALSE(device.figures().known);
}

}  // namespace cost_test
}  // namespace reft
