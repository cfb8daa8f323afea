#include "snapshot/placement/op_listener.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "intercept/base/clock.h"

namespace reft {
namespace op_listener_test {

constexpr int64_t kMs = 1'000'000;
constexpr uint32_t kChunk = 2'000'000;  // a millisecond at the rate that is assumed first
constexpr uint64_t kBytes = 10 * uint64_t{kChunk};

// A rank with an op log, and a copy thread's ear that nothing copies for: time stands still unless
// it is moved. A step is 10 ms work, a wait of 30 ms for a message, 10 ms work, the gate and 5 ms
// of optimizer.
struct FakeRank {
  FakeRank() { log.tell(&events); }

  void pass(int64_t ns) { clock.advance(std::chrono::nanoseconds(ns)); }
  uint64_t begin(OpKind kind, int32_t peer = -1) {
    OpLog::Op op;
    op.kind = kind;
    op.peer = peer;
    op.bytes = 1 << 20;
    return log.begin(op);
  }
  void point() { log.markDone(begin(OpKind::kStep)); }
  void snapshot(int64_t step, PlacementPolicy policy, uint64_t bytes = kBytes,
                uint64_t at_once = 0) {
    events.push({.what = OpEvent::kSnapshot,
                 .group = static_cast<uint32_t>(policy),
                 .tag = kChunk,
                 .ticket = static_cast<uint64_t>(step),
                 .at_ns = clock.nowNs(),
                 .bytes = bytes,
                 .signature = at_once});
  }
  void gate() {
    events.push({.what = OpEvent::kGate,
                 .at_ns = clock.nowNs(),
                 .signature = static_cast<uint64_t>(clock.nowNs())});
  }
  void rest() {
    pass(10 * kMs);
    gate();
    pass(5 * kMs);
  }
  // From one program point to the next.
  void step(int64_t wait_ns = 30 * kMs) {
    pass(10 * kMs);
    const uint64_t ticket = begin(OpKind::kRecv, 0);
    log.markWaitBegin(ticket);
    pass(wait_ns);
    log.markWaitEnd(ticket);
    log.markDone(ticket);
    rest();
    point();
  }
  void learn() {
    point();
    for (int i = 0; i < 6; ++i) {
      step();
    }
    placement.update();
  }
  Grant ask(int64_t step) {
    placement.update();
    return placement.ask(step, clock.nowNs());
  }

  ManualClock clock;
  OpEvents events;
  OpLog log{nullptr, 64, clock};
  OpListener placement{events};
};

TEST(OpListener, CopiesInTheWaitAndNotBefore) {
  FakeRank rank;
  rank.learn();
  rank.snapshot(7, PlacementPolicy::kGap);
  Grant grant = rank.ask(7);
  EXPECT_EQ(grant.bytes, 0u);
  EXPECT_LT(grant.retry_ns, rank.clock.nowNs() + 100 * kMs)
      << "never for ever: training may have stopped";
  EXPECT_EQ(rank.placement.awaited(), OpEvents::bit(OpEvent::kWaitBegin));
  rank.pass(10 * kMs);
  EXPECT_EQ(rank.ask(7).bytes, 0u);
  const uint64_t ticket = rank.begin(OpKind::kRecv, 0);
  EXPECT_EQ(rank.ask(7).bytes, 0u) << "begun, not yet waited for";
  rank.log.markWaitBegin(ticket);
  grant = rank.ask(7);
  EXPECT_GE(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kGap);
  EXPECT_EQ(rank.placement.awaited(), OpEvents::bit(OpEvent::kWaitEnd));
  rank.placement.copied(kBytes - kChunk, grant.tier, rank.clock.nowNs(),
                        rank.clock.nowNs() + 9 * kMs);
  rank.pass(9 * kMs);
  rank.log.markWaitEnd(ticket);
  // The gap was short and no other comes: the rest is spread over the work that is left.
  grant = rank.ask(7);
  EXPECT_EQ(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kCompute);
}

TEST(OpListener, WaitsForCollectivesAreGapsOnTheCpu) {
  FakeRank rank;
  rank.point();
  const auto step = [&] {
    rank.pass(10 * kMs);
    const uint64_t ticket = rank.begin(OpKind::kAllreduce);
    rank.log.markWaitBegin(ticket);
    rank.pass(30 * kMs);
    rank.log.markWaitEnd(ticket);
    rank.log.markDone(ticket);
    rank.rest();
    rank.point();
  };
  for (int i = 0; i < 6; ++i) {
    step();
  }
  rank.snapshot(7, PlacementPolicy::kGap);
  EXPECT_EQ(rank.ask(7).bytes, 0u);
  rank.pass(10 * kMs);
  const uint64_t ticket = rank.begin(OpKind::kAllreduce);
  rank.log.markWaitBegin(ticket);
  const Grant grant = rank.ask(7);
  EXPECT_GE(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kGap);
}

TEST(OpListener, WithoutWaitsCopiesKeepAwayFromCollectivesUnderWay) {
  FakeRank rank;
  uint64_t bucket = 0;
  const auto begin = [&] {  // DDP: half of backward beside an all-reduce that nobody waits for
    rank.point();
    rank.pass(40 * kMs);
    bucket = rank.begin(OpKind::kAllreduce);
  };
  const auto end = [&] {
    rank.pass(20 * kMs);
    rank.log.markDone(bucket);
    rank.log.markDone(bucket);  // noticed twice: counted once
    rank.rest();
  };
  for (int i = 0; i < 6; ++i) {
    begin();
    end();
  }
  begin();
  rank.snapshot(7, PlacementPolicy::kGap, 2 * uint64_t{kChunk});
  Grant grant = rank.ask(7);
  EXPECT_EQ(grant.bytes, 0u);
  EXPECT_NE(rank.placement.awaited() & OpEvents::bit(OpEvent::kDone), 0u);
  EXPECT_LT(grant.retry_ns, rank.clock.nowNs() + 100 * kMs);
  rank.pass(20 * kMs);
  rank.log.markDone(bucket);
  grant = rank.ask(7);
  EXPECT_EQ(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kCompute);
}

TEST(OpListener, EagerIsNeverHeldUpAndTellsWhereItsBytesFell) {
  FakeRank rank;
  rank.learn();
  rank.snapshot(7, PlacementPolicy::kEager);
  Grant grant = rank.ask(7);
  EXPECT_EQ(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kCompute);
  rank.pass(10 * kMs);
  const uint64_t ticket = rank.begin(OpKind::kRecv, 0);
  rank.log.markWaitBegin(ticket);
  grant = rank.ask(7);
  EXPECT_EQ(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kGap);
}

TEST(OpListener, ThePolicyIsTheSnapshots) {
  FakeRank rank;
  rank.learn();
  rank.snapshot(7, PlacementPolicy::kGap);
  EXPECT_EQ(rank.ask(7).bytes, 0u);
  rank.step();
  rank.snapshot(8, PlacementPolicy::kEager);
  EXPECT_EQ(rank.ask(8).bytes, kChunk);
  rank.step();
  rank.snapshot(9, PlacementPolicy::kGap);
  EXPECT_EQ(rank.ask(9).bytes, 0u);
}

TEST(OpListener, ASnapshotOfWhichNothingWasHeardIsNotHeldUp) {
  FakeRank rank;
  rank.learn();
  EXPECT_GT(rank.ask(7).bytes, 0u);
  rank.snapshot(7, PlacementPolicy::kGap);
  EXPECT_EQ(rank.ask(7).bytes, 0u);
  EXPECT_GT(rank.ask(8).bytes, 0u);
}

TEST(OpListener, StepsOfWhichEventsWereLostAreNotLearnt) {
  FakeRank rank;
  rank.learn();
  EXPECT_EQ(rank.placement.placer().model().forecast()->steps_seen, 6u);
  rank.step();
  rank.placement.update();
  EXPECT_EQ(rank.placement.placer().model().forecast()->steps_seen, 7u);
  const uint64_t ticket = rank.begin(OpKind::kRecv, 0);
  while (rank.events.lost() == 0) {
    rank.log.markWaitBegin(ticket);
  }
  rank.placement.update();
  rank.point();
  rank.placement.update();
  rank.step();
  rank.placement.update();
  // The step with the hole is not among them, the ones around it are.
  EXPECT_EQ(rank.placement.placer().model().forecast()->steps_seen, 8u);
}

TEST(OpListener, WithoutProgramPointsSnapshotsAreThem) {
  FakeRank rank;
  for (int64_t step = 1; step <= 6; ++step) {
    rank.snapshot(step, PlacementPolicy::kGap);
    rank.pass(10 * kMs);
    const uint64_t ticket = rank.begin(OpKind::kRecv, 0);
    rank.log.markWaitBegin(ticket);
    rank.pass(30 * kMs);
    rank.log.markWaitEnd(ticket);
    rank.log.markDone(ticket);
    rank.rest();
  }
  rank.snapshot(7, PlacementPolicy::kGap);
  EXPECT_EQ(rank.ask(7).bytes, 0u);
  EXPECT_EQ(rank.placement.steps(), 7u);
  EXPECT_TRUE(rank.placement.placer().plan().from_forecast);
}

TEST(OpListener, AtTheGateNothingIsLeftToAskFor) {
  FakeRank rank;
  rank.learn();
  rank.snapshot(7, PlacementPolicy::kGap);
  EXPECT_EQ(rank.ask(7).bytes, 0u);
  rank.pass(10 * kMs);
  rank.gate();
  rank.placement.update();
  EXPECT_EQ(rank.placement.placer().bytesLeft(), 0u);
  EXPECT_EQ(rank.placement.placer().granted(Tier::kGate), kBytes);
}

}  // namespace op_listener_test
}  // namespace reft
