#include "snapshot/device/device_step.h"

#include <gtest/gtest.h>

#include <array>

namespace reft {
namespace device_step_test {

std::array<uint64_t, kTiers> byTier(const DeviceStep& step) {
  std::array<uint64_t, kTiers> bytes{};
  for (const DeviceCopies& part : partsOf(step)) {
    bytes[static_cast<size_t>(part.tier)] += part.bytes;
  }
  return bytes;
}
uint64_t of(const std::array<uint64_t, kTiers>& bytes, Tier tier) {
  return bytes[static_cast<size_t>(tier)];
}

TEST(DeviceStep, CopiesAreCutWhereWaitsBeginAndEnd) {
  DeviceStep step;
  step.begin_ns = 0;
  step.end_ns = 1000;
  step.waits = {{100, 200, OpKind::kRecv, 8, true},
                {300, 400, OpKind::kAllreduce, 1 << 20, false},
                {500, 600, OpKind::kRecv, 8, true}};
  step.copies = {{50, 450, 4000, Tier::kCompute}};
  const auto parts = partsOf(step);
  ASSERT_EQ(parts.size(), 5u);
  const Tier expected[] = {Tier::kCompute, Tier::kGap, Tier::kCompute, Tier::kCommunication,
                           Tier::kCompute};
  int64_t at = 50;
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].begin_ns, at);
    EXPECT_EQ(parts[i].tier, expected[i]);
    EXPECT_EQ(parts[i].bytes, static_cast<uint64_t>(parts[i].end_ns - parts[i].begin_ns) * 10);
    at = parts[i].end_ns;
  }
  EXPECT_EQ(at, 450);
}

TEST(DeviceStep, WhatItWasOrderedAsDoesNotMatter) {
  DeviceStep step;
  step.waits = {{100, 200, OpKind::kRecv, 8, true}};
  step.copies = {{100, 200, 10, Tier::kCompute}, {200, 300, 20, Tier::kGap}};
  const auto bytes = byTier(step);
  EXPECT_EQ(of(bytes, Tier::kGap), 10u);
  EXPECT_EQ(of(bytes, Tier::kCompute), 20u);
}

TEST(DeviceStep, WhatTrainingWaitedForStaysWhole) {
  DeviceStep step;
  step.waits = {{0, 100, OpKind::kRecv, 8, true}};
  step.gate_begin_ns = 150;
  step.gate_end_ns = 250;
  step.copies = {
      {0, 50, 5, Tier::kAtOnce}, {140, 240, 100, Tier::kGap}, {240, 250, 7, Tier::kGate}};
  const auto bytes = byTier(step);
  EXPECT_EQ(of(bytes, Tier::kAtOnce), 5u);
  EXPECT_EQ(of(bytes, Tier::kCompute), 10u);
  EXPECT_EQ(of(bytes, Tier::kGate), 97u);
}

TEST(DeviceStep, NoByteIsLostByRounding) {
  DeviceStep step;
  for (int64_t at = 0; at < 1000; at += 7) {
    step.waits.push_back({at, at + 3, OpKind::kRecv, 8, at % 2 == 0});
  }
  step.copies = {{1, 998, 12'345, Tier::kCompute}, {998, 998, 3, Tier::kCompute}};
  uint64_t all = 0;
  for (const uint64_t bytes : byTier(step)) {
    all += bytes;
  }
  EXPECT_EQ(all, 12'348u);
}

// 100 of the step, at the gate since 60 of it.
DeviceStep atHost(int64_t point_begin_ns, int64_t point_end_ns) {
  DeviceStep step;
  step.begin_ns = 1000;
  step.gate_begin_ns = 1060;
  step.gate_end_ns = 1080;
  step.end_ns = 1100;
  step.point_begin_ns = point_begin_ns;
  step.point_end_ns = point_end_ns;
  return step;
}

TEST(DeviceStep, WithoutASnapshotThereIsNoWaitAtTheGate) {
  EXPECT_EQ(withoutSnapshotNs(atHost(1000, 1000), 20), 80);
  EXPECT_EQ(withoutSnapshotNs(atHost(1000, 1000), 25), 85)
      << "what comes behind it is another step's";
}

TEST(DeviceStep, AGateAtAnotherPlaceNowAndThenDoesNotCount) {
  AfterGate after_gate;
  EXPECT_EQ(after_gate.usualNs(), 0);
  DeviceStep early = atHost(1000, 1000);
  early.gate_begin_ns = early.gate_end_ns = 1000;
  for (int step = 0; step < 8; ++step) {
    after_gate.add(step % 4 == 3 ? early : atHost(1000, 1000));
    EXPECT_EQ(after_gate.usualNs(), 20);
  }
  for (int step = 0; step < 3; ++step) {
    after_gate.add(early);
  }
  EXPECT_EQ(after_gate.usualNs(), 100) << "it is always there by now";
}

TEST(DeviceStep, TheHostsTimeAtTheProgramPointCountsAsFarAsItIsNotAhead) {
  EXPECT_EQ(withoutSnapshotNs(atHost(1000, 1010), 20), 70)
      << "the device had nothing to do meanwhile";
  EXPECT_EQ(withoutSnapshotNs(atHost(996, 1006), 20), 74) << "it was 4 ahead";
  EXPECT_EQ(withoutSnapshotNs(atHost(900, 910), 20), 80) << "it was further ahead than it needed";
  EXPECT_EQ(withoutSnapshotNs(atHost(1005, 1015), 20), 70) << "clocks are not that exact";
}

}  // namespace device_step_test
}  // namespace reft
