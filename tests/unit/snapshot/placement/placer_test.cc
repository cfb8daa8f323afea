#include "snapshot/placement/placer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "snapshot/placement/simulate/simulator.h"

namespace reft {
namespace placer_test {

constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kChunk = 1'000'000;  // a millisecond at the rate below

PlacerOptions optionsFor(PlacementPolicy policy) {
  PlacerOptions options;
  options.policy = policy;
  options.chunk_bytes = kChunk;
  options.bytes_per_sec = 1e9;
  return options;
}

ScheduleOp receive(int32_t peer) {
  return scheduleOp(OpKind::kRecv, 0, peer, 0, 1000);
}
const ScheduleOp kReduce = scheduleOp(OpKind::kAllreduce, 1, -1, 0, 1 << 20);

// A step of 10 ms work, 20 ms bubble, 10 ms work, 10 ms bubble, 5 ms work, 8 ms all-reduce, 2 ms
// work, gate, 5 ms optimizer.
struct FakeRank {
  explicit FakeRank(const PlacerOptions& options) : placer(options) { begin(0); }

  void begin(uint64_t bytes, uint64_t at_once = 0) { placer.beginStep(now, bytes, at_once); }
  // Copies whatever is granted until `until_ns`; returns the bytes copied.
  uint64_t pass(int64_t until_ns) {
    uint64_t bytes = 0;
    while (now < until_ns) {
      const Grant grant = placer.ask(now);
      if (grant.bytes == 0) {
        now = std::min(until_ns, std::max(grant.retry_ns, now + 1));
        continue;
      }
      const uint64_t chunk = std::min(grant.bytes, kChunk);
      const auto span = static_cast<int64_t>(chunk);  // 1 byte takes 1 ns
      placer.copied(chunk, grant.tier, now, now + span);
      now += span;
      bytes += chunk;
    }
    return bytes;
  }
  uint64_t work(int64_t ns) { return pass(now + ns); }
  uint64_t wait(const ScheduleOp& op, int64_t ns) {
    placer.opBegin(op, now);
    placer.waitBegin(op, now);
    const int64_t begun = now;
    const uint64_t bytes = pass(now + ns);
    // A copy under way does not end the wait later: what is measured is the wait.
    placer.waitEnd(begun + ns);
    placer.opDone(op, begun + ns);
    return bytes;
  }
  // Returns the bytes copied in each part, the gate's last.
  std::vector<uint64_t> step(uint64_t next_bytes) {
    std::vector<uint64_t> bytes;
    bytes.push_back(work(10 * kMs));
    bytes.push_back(wait(receive(0), 20 * kMs));
    bytes.push_back(work(10 * kMs));
    bytes.push_back(wait(receive(2), 10 * kMs));
    bytes.push_back(work(5 * kMs));
    bytes.push_back(wait(kReduce, 8 * kMs));
    bytes.push_back(work(2 * kMs));
    const int64_t gate = now;
    bytes.push_back(placer.gate(gate));
    now += static_cast<int64_t>(bytes.back());
    placer.gateDone(gate, now);
    now += 5 * kMs;
    begin(next_bytes);
    return bytes;
  }
  void learn() {
    for (int i = 0; i < 8; ++i) {
      step(0);
    }
  }

  Placer placer;
  int64_t now = 1'000'000'000;
};

uint64_t planned(const FakeRank& rank, Tier tier) {
  return rank.placer.plan().bytes[static_cast<size_t>(tier)];
}

TEST(Placer, WithoutAForecastCopiesBesideCompute) {
  Placer placer(optionsFor(PlacementPolicy::kGap));
  placer.beginStep(1000, 5 * kChunk);
  EXPECT_FALSE(placer.plan().from_forecast);
  EXPECT_EQ(placer.plan().bytes[static_cast<size_t>(Tier::kCompute)], 5 * kChunk);
  const Grant grant = placer.ask(1000);
  EXPECT_EQ(grant.bytes, kChunk);
  EXPECT_EQ(grant.tier, Tier::kCompute);
}

TEST(Placer, WhatFitsIntoGapsIsCopiedThereAndNowhereElse) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(20 * kChunk);
  const std::vector<uint64_t> bytes = rank.step(0);
  EXPECT_EQ(bytes[0] + bytes[2] + bytes[4] + bytes[5] + bytes[6] + bytes[7], 0u);
  EXPECT_EQ(bytes[1] + bytes[3], 20 * kChunk);
  EXPECT_EQ(rank.placer.longestOverrunNs(), 0);
}

TEST(Placer, TiersFillInOrderWhenTheGapsAreTooSmall) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  uint64_t before_compute = 0;
  uint64_t before_communication = 0;
  bool compute_seen = false;
  bool communication_seen = false;
  bool gate_seen = false;
  for (uint64_t chunks = 10; chunks <= 90; chunks += 5) {
    rank.begin(chunks * kChunk);
    const uint64_t compute = planned(rank, Tier::kCompute);
    const uint64_t communication = planned(rank, Tier::kCommunication);
    const uint64_t stalled = planned(rank, Tier::kGate);
    EXPECT_EQ(planned(rank, Tier::kGap) + compute + communication + stalled, chunks * kChunk);
    // A later tier is used only when the earlier ones hold no more.
    EXPECT_TRUE(communication == 0 || compute == before_compute || !communication_seen);
    EXPECT_TRUE(stalled == 0 || communication == before_communication || !gate_seen);
    EXPECT_TRUE(stalled == 0 || communication > 0);
    EXPECT_TRUE(communication == 0 || compute > 0);
    before_compute = compute;
    before_communication = communication;
    compute_seen |= compute > 0;
    communication_seen |= communication > 0;
    gate_seen |= stalled > 0;
    const std::vector<uint64_t> bytes = rank.step(0);
    // What was done agrees with the plan, but for a chunk or two where a tier is just full.
    if (compute + 2 * kChunk < 27 * kChunk) {
      EXPECT_EQ(bytes[5], 0u) << chunks;
    }
    if (communication >= 2 * kChunk) {
      EXPECT_GT(bytes[5], 0u) << chunks;
    }
    EXPECT_EQ(bytes[0] + bytes[2] + bytes[4] + bytes[6] > 0, compute > 0) << chunks;
  }
  EXPECT_TRUE(compute_seen && communication_seen && gate_seen);
}

TEST(Placer, WhatGapsDoNotHoldIsSpreadOverTheWorkAsTheyMayHoldMore) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.step(30 * kChunk);
  const uint64_t beside_work = planned(rank, Tier::kCompute);
  const std::vector<uint64_t> bytes = rank.step(0);
  EXPECT_GT(bytes[0], 0u);
  EXPECT_LT(bytes[0], beside_work) << "not all at once";
  EXPECT_LT(bytes[0] + bytes[2] + bytes[4] + bytes[6], beside_work)
      << "gaps held more than was planned";
}

// DDP: forward, then backward with collectives in flight, none of which is waited for.
TEST(Placer, AStepWithoutGapsIsCopiedAtItsBeginningBesideNoCollective) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  const auto step = [&](uint64_t next_bytes) {
    std::vector<uint64_t> bytes;
    bytes.push_back(rank.work(20 * kMs));
    rank.placer.opBegin(kReduce, rank.now);
    bytes.push_back(rank.work(20 * kMs));
    rank.placer.opDone(kReduce, rank.now);
    bytes.push_back(rank.work(20 * kMs));
    const int64_t gate = rank.now;
    bytes.push_back(rank.placer.gate(gate));
    rank.placer.gateDone(gate, rank.now);
    rank.now += 5 * kMs;
    rank.begin(next_bytes);
    return bytes;
  };
  for (int i = 0; i < 8; ++i) {
    step(0);
  }
  step(15 * kChunk);
  EXPECT_EQ(step(25 * kChunk), (std::vector<uint64_t>{15 * kChunk, 0, 0, 0}));
  EXPECT_EQ(step(0), (std::vector<uint64_t>{20 * kChunk, 0, 5 * kChunk, 0}));
}

TEST(Placer, WhatTheGuardKeepsOutGoesIntoGapsBeforeItGoesBesideWorkIfAsked) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(10 * kChunk);
  const auto in = [](const PlacementPlan& plan, Tier tier) {
    return plan.bytes[static_cast<size_t>(tier)];
  };
  const uint64_t all = 200 * kChunk;
  const PlacementPlan kept = rank.placer.foresee(all, false);
  const PlacementPlan past = rank.placer.foresee(all, true);
  const Forecast& forecast = *rank.placer.model().forecast();
  uint64_t longest = 0;
  for (size_t i = 0; i < past.gap_bytes.size(); ++i) {
    EXPECT_LE(static_cast<int64_t>(past.gap_bytes[i]), forecast.spans[i].wait_ns);  // 1 byte a ns
    EXPECT_GE(past.gap_bytes[i], kept.gap_bytes[i]);
    EXPECT_EQ(past.gap_bytes[i] % kChunk, 0u);
    longest += past.gap_bytes[i] - kept.gap_bytes[i];
  }
  EXPECT_EQ(in(past, Tier::kGap) - in(kept, Tier::kGap), longest);
  EXPECT_GT(longest, 0u);
  EXPECT_LT(in(past, Tier::kGate), in(kept, Tier::kGate));
  // Nothing of it before the guarded part is full.
  const uint64_t fits = in(kept, Tier::kGap);
  EXPECT_EQ(rank.placer.foresee(fits, true).gap_bytes, rank.placer.foresee(fits, false).gap_bytes);
  EXPECT_EQ(in(rank.placer.foresee(fits + kChunk, true), Tier::kGap), fits + kChunk);
  EXPECT_EQ(in(rank.placer.foresee(fits + kChunk, true), Tier::kCompute), 0u);
}

TEST(Placer, CollectivesAreGapsWhenTheCopiesHaveAPathOfTheirOwn) {
  PlacerOptions options = optionsFor(PlacementPolicy::kGap);
  options.shared_link = false;
  FakeRank rank(options);
  rank.learn();
  rank.begin(34 * kChunk);
  EXPECT_EQ(planned(rank, Tier::kGap), 34 * kChunk);
  EXPECT_GT(rank.step(0)[5], 0u);
}

TEST(Placer, NoGapIsPlannedPastItsEnd) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(200 * kChunk);
  const Forecast& forecast = *rank.placer.model().forecast();
  const std::vector<uint64_t>& gaps = rank.placer.plan().gap_bytes;
  ASSERT_EQ(gaps.size(), forecast.spans.size());
  for (size_t i = 0; i < gaps.size(); ++i) {
    EXPECT_LE(static_cast<int64_t>(gaps[i]), forecast.spans[i].wait_ns);
    EXPECT_EQ(gaps[i] % kChunk, 0u);
  }
  EXPECT_GT(gaps[0], 0u);
  EXPECT_EQ(gaps[2], 0u);  // the collective
}

TEST(Placer, AGapThatEndsEarlyStopsTheCopyAndWidensTheGuard) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(5 * kChunk);
  rank.work(10 * kMs);
  const double guard = rank.placer.guardJitters();
  rank.placer.opBegin(receive(0), rank.now);
  rank.placer.waitBegin(receive(0), rank.now);
  const Grant grant = rank.placer.ask(rank.now);
  ASSERT_EQ(grant.tier, Tier::kGap);
  ASSERT_GT(grant.bytes,
            kChunk);  // several at once are allowed; the end of the gap takes them back
  rank.placer.waitEnd(rank.now + kMs / 2);
  rank.placer.copied(kChunk, grant.tier, rank.now, rank.now + kMs);
  EXPECT_EQ(rank.placer.longestOverrunNs(), kMs / 2);
  EXPECT_GT(rank.placer.guardJitters(), guard);
  // The other gap holds the rest.
  EXPECT_EQ(rank.placer.ask(rank.now + kMs).bytes, 0u);
}

TEST(Placer, GapsThatAreKeptNarrowTheGuardAgain) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  const double guard = rank.placer.guardJitters();
  for (int i = 0; i < 5; ++i) {
    rank.begin(20 * kChunk);
    rank.step(0);
  }
  EXPECT_LT(rank.placer.guardJitters(), guard);
  EXPECT_GE(rank.placer.guardJitters(), 1.0);
}

TEST(Placer, AGapOfWhichNothingWasKnownIsUsedOnceItHasLasted) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(20 * kChunk);
  rank.work(10 * kMs);
  const ScheduleOp strange = receive(7);
  rank.placer.opBegin(strange, rank.now);
  rank.placer.waitBegin(strange, rank.now);
  const Grant early = rank.placer.ask(rank.now);
  EXPECT_EQ(early.bytes, 0u);
  ASSERT_LT(early.retry_ns, rank.now + 5 * kMs);
  EXPECT_EQ(rank.placer.ask(early.retry_ns).bytes, kChunk);
}

TEST(Placer, AStepThatTakesMuchLongerKeepsNothingBackForItsGaps) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(5 * kChunk);
  EXPECT_EQ(rank.placer.ask(rank.now).bytes, 0u);
  EXPECT_EQ(rank.work(200 * kMs), 5 * kChunk);  // an evaluation, say
}

TEST(Placer, AtOnceBytesAreNoMatterOfPlacement) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(20 * kChunk, 4 * kChunk);
  EXPECT_EQ(rank.placer.bytesLeft(), 16 * kChunk);
  EXPECT_EQ(planned(rank, Tier::kAtOnce), 4 * kChunk);
  EXPECT_EQ(planned(rank, Tier::kGap), 16 * kChunk);
}

TEST(Placer, EagerTakesWhateverIsThere) {
  FakeRank rank(optionsFor(PlacementPolicy::kEager));
  rank.learn();
  rank.begin(14 * kChunk);
  const std::vector<uint64_t> bytes = rank.step(0);
  EXPECT_EQ(bytes[0], 10 * kChunk);
  EXPECT_EQ(bytes[1], 4 * kChunk);
}

TEST(Placer, PaperPutsTheShareOfItsFormulaIntoBubbles) {
  PlacerOptions options = optionsFor(PlacementPolicy::kPaper);
  options.stages = 4;
  options.stage = 1;
  options.micro_batch_ns = kMs;
  FakeRank rank(options);
  rank.learn();
  rank.begin(100 * kChunk);
  // (0.8*4 + 2*4 - 1 - 2) * 1 ms = 8.2 ms of the 100 ms that the snapshot takes.
  EXPECT_NEAR(static_cast<double>(planned(rank, Tier::kGap)), 8.2e6, 1e4);
  EXPECT_EQ(planned(rank, Tier::kGap) + planned(rank, Tier::kCompute), 100 * kChunk);
}

TEST(Placer, TheFirstMeasuredRateReplacesTheGuess) {
  Placer placer(optionsFor(PlacementPolicy::kEager));
  placer.beginStep(0, 100 * kChunk);
  placer.copied(kChunk, Tier::kCompute, 0, 4 * kMs);  // a quarter of what was guessed
  EXPECT_DOUBLE_EQ(placer.bytesPerSec(Tier::kCompute), 0.25e9);
  EXPECT_DOUBLE_EQ(placer.bytesPerSec(Tier::kGap), 0.25e9) << "nearer than the guess";
  placer.copied(kChunk, Tier::kGap, 4 * kMs, 6 * kMs);
  EXPECT_DOUBLE_EQ(placer.bytesPerSec(Tier::kGap), 0.5e9);
  EXPECT_DOUBLE_EQ(placer.bytesPerSec(Tier::kCompute), 0.25e9);
}

TEST(Placer, RatesAreAveragedAsTimePerByte) {
  Placer placer(optionsFor(PlacementPolicy::kEager));
  placer.beginStep(0, 1000 * kChunk);
  int64_t now = 0;
  for (int i = 0; i < 400; ++i) {
    const int64_t span =
        i % 2 == 0 ? kMs : 9 * kMs;  // 5 ms a chunk: the mean of the rates would say 1.8
    placer.copied(kChunk, Tier::kGap, now, now + span);
    now += span;
  }
  EXPECT_GT(placer.bytesPerSec(Tier::kGap), 1e9 / 6);
  EXPECT_LT(placer.bytesPerSec(Tier::kGap), 1e9 / 4);
}

TEST(Placer, ASlowCopyThatRunsPastItsGapDoesNotWidenTheGuard) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(5 * kChunk);
  rank.work(10 * kMs);
  const double guard = rank.placer.guardJitters();
  rank.placer.opBegin(receive(0), rank.now);
  rank.placer.waitBegin(receive(0), rank.now);
  ASSERT_EQ(rank.placer.ask(rank.now).tier, Tier::kGap);
  rank.placer.waitEnd(rank.now + 15 * kMs);  // early, but there was time for fifteen such chunks
  rank.placer.copied(kChunk, Tier::kGap, rank.now, rank.now + 16 * kMs);
  EXPECT_EQ(rank.placer.longestOverrunNs(), kMs);
  EXPECT_LE(rank.placer.guardJitters(), guard);
}

TEST(Placer, GapsGetSharesInProportionToTheirRoom) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(12 * kChunk);
  const std::vector<uint64_t> planned_bytes = rank.placer.plan().gap_bytes;
  EXPECT_GE(planned_bytes[0], 7 * kChunk);
  EXPECT_LE(planned_bytes[0], 9 * kChunk);
  EXPECT_EQ(planned_bytes[0] + planned_bytes[1], 12 * kChunk);
  const std::vector<uint64_t> bytes = rank.step(0);
  EXPECT_EQ(bytes[1], planned_bytes[0]);
  EXPECT_EQ(bytes[3], planned_bytes[1]);
}

TEST(Placer, WhatAShortGapDidNotHoldFindsRoomInALaterOne) {
  FakeRank rank(optionsFor(PlacementPolicy::kGap));
  rank.learn();
  rank.begin(12 * kChunk);
  EXPECT_EQ(rank.work(10 * kMs), 0u);
  EXPECT_EQ(rank.wait(receive(0), 4 * kMs), 4 * kChunk);  // a fifth of its length
  EXPECT_EQ(rank.work(10 * kMs), 0u);
  EXPECT_EQ(rank.wait(receive(2), 10 * kMs), 8 * kChunk);
}

// --- all kinds of schedules: what the ranks of a simulated job really did

TEST(Placer, CopiesNeverRunPastAGapByMoreThanAChunk) {
  using simulate::ScheduleKind;
  for (const ScheduleKind kind :
       {ScheduleKind::kGpipe, ScheduleKind::kOneFOneB, ScheduleKind::kInterleaved,
        ScheduleKind::kZeroBubble, ScheduleKind::kDdp, ScheduleKind::kFsdp}) {
    for (const double jitter : {0.0, 0.02, 0.2}) {
      simulate::SimulationOptions options;
      options.schedule.kind = kind;
      options.schedule.replicas = 2;
      options.schedule.stages = kind == ScheduleKind::kDdp || kind == ScheduleKind::kFsdp ? 1 : 4;
      options.jitter = jitter;
      options.placer.shared_link = false;
      options.snapshot_bytes = 900'000'000;
      options.change_at_step = 20;
      options.change_factor = 0.5;
      const simulate::SimulationResult result = simulate::runSimulation(options);
      EXPECT_LE(result.longest_overrun_chunks, 1.001)
          << simulate::scheduleName(kind) << " " << jitter;
      EXPECT_GT(result.snapshots_per_step, 0.99);
    }
  }
}

}  // namespace placer_test
}  // namespace reft
