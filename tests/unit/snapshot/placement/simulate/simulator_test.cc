#include "snapshot/placement/simulate/simulator.h"

#include <gtest/gtest.h>

#include <numeric>

#include "intercept/base/error.h"

namespace reft::simulate {
namespace simulator_test {

constexpr int64_t kMs = 1'000'000;

// No jitter, and a link that takes no time.
SimulationOptions ideal(ScheduleKind kind, int stages = 4) {
  SimulationOptions options;
  options.schedule.kind = kind;
  options.schedule.stages = stages;
  options.schedule.forward_ns = 10 * kMs;
  options.schedule.backward_ns = 20 * kMs;
  options.schedule.link_bytes_per_sec = 1e18;
  options.schedule.link_latency_ns = 0;
  options.jitter = 0;
  options.snapshot_bytes = 0;
  return options;
}

TEST(Simulator, GapsOfOneFOneBAreTheKnownOnes) {
  for (const auto& [stages, backward_ms] : {std::pair{4, 20}, std::pair{3, 15}, std::pair{6, 25}}) {
    SimulationOptions options = ideal(ScheduleKind::kOneFOneB, stages);
    options.schedule.backward_ns = backward_ms * kMs;
    for (int stage = 0; stage < stages; ++stage) {
      options.trace_rank = stage;
      const SimulationResult result = runSimulation(options);
      std::vector<int64_t> gaps;  // of the newest whole step
      for (const OpEntry& entry : result.trace) {
        if (entry.kind == OpKind::kStep && entry.seq == static_cast<uint32_t>(options.steps - 1)) {
          gaps.clear();
        }
        const auto gap_ns = static_cast<int64_t>(entry.wait_end_ns - entry.wait_begin_ns);
        if (gap_ns > 1000) {
          gaps.push_back(gap_ns);
        }
      }
      const std::vector<int64_t> known = oneFOneBGaps(options.schedule, stage);
      EXPECT_EQ(gaps, known) << "stage " << stage << " of " << stages;
      EXPECT_EQ(std::accumulate(known.begin(), known.end(), int64_t{0}),
                (stages - 1) * (options.schedule.forward_ns + options.schedule.backward_ns));
    }
  }
}

TEST(Simulator, PrintedBubbleFormulaIsTwoToThreeTimesTheBubbles) {
  const SimulationOptions options = ideal(ScheduleKind::kOneFOneB);
  const double real = runSimulation(options).bubble_ns;
  EXPECT_NEAR(real, 90 * kMs, kMs);
  EXPECT_NEAR(paperBubbleNs(options.schedule, 0), 276 * kMs, kMs);
  EXPECT_NEAR(paperBubbleNs(options.schedule, 3), 186 * kMs, kMs);
}

TEST(Simulator, OtherSchedulesHaveTheBubblesTheyAreMadeFor) {
  EXPECT_NEAR(runSimulation(ideal(ScheduleKind::kGpipe)).bubble_ns, 90 * kMs, kMs);
  EXPECT_NEAR(runSimulation(ideal(ScheduleKind::kInterleaved)).bubble_ns, 45 * kMs, kMs);
  // (P-1)(t_f + t_b - t_w) with t_f = t_b = t_w.
  EXPECT_NEAR(runSimulation(ideal(ScheduleKind::kZeroBubble)).bubble_ns, 30 * kMs, kMs);
  SimulationOptions ddp = ideal(ScheduleKind::kDdp, 1);
  ddp.schedule.replicas = 4;
  EXPECT_EQ(runSimulation(ddp).bubble_ns, 0);
}

TEST(Simulator, TheSameOptionsGiveTheSameResult) {
  SimulationOptions options = ideal(ScheduleKind::kOneFOneB);
  options.jitter = 0.05;
  options.schedule.replicas = 3;
  options.snapshot_bytes = 800'000'000;
  const SimulationResult first = runSimulation(options);
  EXPECT_EQ(first.step_ns, runSimulation(options).step_ns);
  options.seed = 2;
  EXPECT_NE(first.step_ns, runSimulation(options).step_ns);
}

TEST(Simulator, AllBytesAreCopiedWhateverThePolicy) {
  SimulationOptions options = ideal(ScheduleKind::kOneFOneB);
  options.schedule.replicas = 2;
  options.schedule.link_bytes_per_sec = 10e9;
  options.jitter = 0.05;
  options.at_once_bytes = 1'000'000;
  for (const uint64_t bytes :
       {uint64_t{3'000'000}, uint64_t{400'000'000}, uint64_t{6'000'000'000}}) {
    options.snapshot_bytes = bytes;
    for (const PlacementPolicy policy : {PlacementPolicy::kGap, PlacementPolicy::kEager,
                                         PlacementPolicy::kSync, PlacementPolicy::kPaper}) {
      options.placer.policy = policy;
      const SimulationResult result = runSimulation(options);
      const double expected =
          static_cast<double>(bytes) * 8 * (options.steps - options.warm_up_steps);
      EXPECT_NEAR(std::accumulate(result.bytes.begin(), result.bytes.end(), 0.0), expected,
                  expected * 0.001)
          << placementPolicyName(policy) << " " << bytes;
    }
  }
}

TEST(Simulator, CopiesInGapsCostNothingAndEagerOnesDo) {
  SimulationOptions options = ideal(ScheduleKind::kOneFOneB);
  options.jitter = 0.01;
  const double without = runSimulation(options).iteration_ns;
  options.snapshot_bytes = 400'000'000;
  const SimulationResult gap = runSimulation(options);
  EXPECT_GE(gap.bytes_in_gaps_share, 0.95);
  EXPECT_LT(gap.iteration_ns / without, 1.01);
  options.placer.policy = PlacementPolicy::kEager;
  const SimulationResult eager = runSimulation(options);
  EXPECT_GT(eager.iteration_ns, gap.iteration_ns);
  EXPECT_GT(eager.bytes[static_cast<size_t>(Tier::kCompute)], 0);
  options.placer.policy = PlacementPolicy::kSync;
  EXPECT_NEAR(runSimulation(options).stall_ns, 40 * kMs, kMs);
}

TEST(Simulator, CopiesBesideACollectiveSlowIt) {
  SimulationOptions options = ideal(ScheduleKind::kFsdp, 1);
  options.schedule.replicas = 4;
  options.schedule.link_bytes_per_sec = 5e9;
  options.compute_slowdown = 1;
  const double without = runSimulation(options).iteration_ns;
  options.snapshot_bytes = 2'000'000'000;
  options.placer.policy = PlacementPolicy::kEager;
  EXPECT_GT(runSimulation(options).iteration_ns, without * 1.02);
  options.communication_slowdown = 1;
  EXPECT_NEAR(runSimulation(options).iteration_ns, without, without * 0.001);
}

TEST(Simulator, ManyRanks) {
  SimulationOptions options = ideal(ScheduleKind::kOneFOneB);
  options.jitter = 0.02;
  options.schedule.replicas = 500;
  options.steps = 8;
  options.warm_up_steps = 4;
  options.snapshot_bytes = 200'000'000;
  const SimulationResult result = runSimulation(options);
  EXPECT_GT(result.iteration_ns, 330 * kMs);
  EXPECT_GE(result.bytes_in_gaps_share, 0.9);
}

TEST(Simulator, SnapshotsThatCostTooMuchBecomeRarer) {
  SimulationOptions options = ideal(ScheduleKind::kDdp, 1);
  options.schedule.replicas = 2;
  options.jitter = 0.005;
  options.placer.policy = PlacementPolicy::kEager;
  options.snapshot_bytes = uint64_t{1} << 30;
  options.compute_slowdown = 2;
  options.steps = 500;
  options.warm_up_steps = 200;
  const SimulationResult always = runSimulation(options);
  EXPECT_DOUBLE_EQ(always.snapshots_per_step, 1);
  options.overhead_limit = 0.02;
  const SimulationResult limited = runSimulation(options);
  EXPECT_GT(limited.every, 1);
  EXPECT_NEAR(limited.snapshots_per_step, 1 / limited.every, 0.01);
  ASSERT_TRUE(limited.overhead.known);
  EXPECT_LE(static_cast<double>(limited.overhead.ppm) / limited.every, 20'000);
  EXPECT_LT(limited.iteration_ns, always.iteration_ns);
}

TEST(Simulator, SaysWhatMakesNoSense) {
  SimulationOptions options = ideal(ScheduleKind::kInterleaved);
  options.schedule.micro_batches = 6;
  EXPECT_THROW(runSimulation(options), InvalidArgument);
  options = ideal(ScheduleKind::kDdp);
  EXPECT_THROW(runSimulation(options), InvalidArgument);
  options = ideal(ScheduleKind::kOneFOneB);
  options.steps = options.warm_up_steps;
  EXPECT_THROW(runSimulation(options), InvalidArgument);
  EXPECT_THROW(scheduleNamed("2f2b"), InvalidArgument);
  EXPECT_EQ(scheduleNamed("1f1b"), ScheduleKind::kOneFOneB);
}

}  // namespace simulator_test
}  // namespace reft::simulate
