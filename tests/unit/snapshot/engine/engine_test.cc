#include "snapshot/engine/engine.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "intercept/base/error.h"
#include "snapshot/state/parity_cells.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

namespace reft {
namespace engine_test {

using namespace std::chrono_literals;
constexpr uint64_t kChunk = 4096;
constexpr uint64_t kInc = 77;

RegionInfo region(const std::string& name, uint64_t bytes, int32_t group = -1, bool early = false) {
  return {name, "uint8", {static_cast<int64_t>(bytes)}, bytes, bytes == 0 ? 0u : 1u, group, early};
}

// Version counters that a test moves. Copy threads can be held up in it: they have then read at
// most their first piece.
class FakeVersions final : public VersionReader {
 public:
  explicit FakeVersions(size_t regions, bool blocking = false)
      : values_(regions), open_(!blocking) {}
  uint64_t version(size_t region) const noexcept override {
    if (std::this_thread::get_id() != owner_) {
      std::unique_lock lock(mutex_);
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }
    return values_[region].load();
  }
  void bump(size_t region) { ++values_[region]; }
  // Returns when `threads` copy threads stand still.
  void waitUntilBlocked(int threads = 1) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= threads; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  const std::thread::id owner_ = std::this_thread::get_id();
  std::vector<std::atomic<uint64_t>> values_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int waiting_ = 0;
  bool open_;
};

class EngineTest : public testing::Test {
 protected:
  void start(EngineOptions options, uint32_t slots = 2) {
    options.incarnation = kInc;
    engine_.reset();
    vault_ = Vault::create({"job", 0, 1}, slots, 64);
    engine_ = std::make_unique<SnapshotEngine>(
        options, *vault_,
        [this](const wire::Ballot& ballot) {
          {
            const std::lock_guard lock(mutex_);
            votes_.push_back(ballot);
          }
          if (commit_) {
            voter_->outcome(ballot);
          }
        },
        *clock_);
    voter_ = engine_.get();
  }
  void start() { start(EngineOptions{}); }
  // Regions with contents of their own.
  void state(std::vector<RegionInfo> regions, std::vector<GroupInfo> groups = {},
             uint64_t chunk = kChunk) {
    fill(regions);
    table_ = buildTable(0, 1, std::move(regions), std::move(groups), "none", {}, chunk);
    engine_->setTable(table_);
  }
  void fill(const std::vector<RegionInfo>& regions) {
    data_.clear();
    std::mt19937_64 random(regions.size());
    for (const RegionInfo& r : regions) {
      data_.emplace_back(r.bytes);
      for (char& c : data_.back()) {
        c = static_cast<char>(random());
      }
    }
  }
  CaptureResult capture(int64_t step, std::shared_ptr<const VersionReader> versions = nullptr,
                        const std::string& objects = "small") {
    std::vector<const void*> addresses;
    for (const auto& d : data_) {
      addresses.push_back(d.data());
    }
    return engine_->capture({step, addresses, std::move(versions), objects});
  }
  void gateAndSettle() {
    engine_->gate();
    engine_->settle();
  }
  void outcome(int64_t step, bool committed) {
    wire::Ballot ballot{};
    ballot.step = step;
    ballot.incarnation = kInc;
    ballot.yes = committed ? 1 : 0;
    engine_->outcome(ballot);
  }
  std::vector<wire::Ballot> votes() {
    const std::lock_guard lock(mutex_);
    return votes_;
  }
  std::optional<SlotView> sealed(const VaultReader& reader, int64_t step) {
    for (const SlotView& view : reader.slots()) {
      if (view.step == step) {
        return view;
      }
    }
    return std::nullopt;
  }
  // Expects that `step` is sealed with the bytes of `expected`.
  void expectSealed(int64_t step, const std::vector<std::vector<char>>& expected) {
    const VaultReader reader(vault_->fd());
    const auto view = sealed(reader, step);
    ASSERT_TRUE(view.has_value()) << "step " << step;
    EXPECT_TRUE(reader.verify(*view).empty());
    const SnapshotTable table = reader.table(*view);
    for (const Piece& piece : table.pieces) {
      ASSERT_EQ(std::memcmp(reader.payload(*view) + piece.payload_offset,
                            expected[piece.region].data() + piece.begin, piece.end - piece.begin),
                0)
          << table.regions[piece.region].name;
    }
  }

  void expectTiersAddUp() {
    const RankStats& stats = vault_->stats();
    EXPECT_EQ(stats.at_once_copied_bytes + stats.gap_copied_bytes + stats.compute_copied_bytes +
                  stats.communication_copied_bytes + stats.gate_copied_bytes,
              stats.bytes_copied.load());
  }

  const Clock* clock_ = &SteadyClock::instance();
  bool commit_ = false;
  std::mutex mutex_;
  std::vector<wire::Ballot> votes_;
  std::vector<std::vector<char>> data_;
  SnapshotTable table_;
  std::unique_ptr<Vault> vault_;
  SnapshotEngine* voter_ = nullptr;  // for its threads: engine_ is empty before it has joined them
  std::unique_ptr<SnapshotEngine> engine_;
};

TEST_F(EngineTest, SealsTheBytesAtCaptureForRandomRegionsAndThreads) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    engine_.reset();
    EngineOptions options;
    options.copy_threads = 1 + round % 3;
    options.verify_full = round % 2 == 1;
    options.policy = std::array{PlacementPolicy::kEager, PlacementPolicy::kGap,
                                PlacementPolicy::kSync}[random() % 3];
    commit_ = true;
    start(options);
    std::vector<RegionInfo> regions;
    for (uint64_t i = random() % 12; i > 0; --i) {
      regions.push_back(region("r" + std::to_string(i), random() % 30'000, -1, random() % 3 == 0));
    }
    state(regions);
    for (int64_t step = 1; step <= 5; ++step) {
      for (auto& d : data_) {
        for (char& c : d) {
          c = static_cast<char>(c + 1);
        }
      }
      ASSERT_EQ(capture(step), CaptureResult::kTaken);
      if (options.policy == PlacementPolicy::kSync) {
        expectSealed(step, data_);
      }
      gateAndSettle();
      expectSealed(step, data_);
      EXPECT_EQ(engine_->committedStep(), step);
    }
    expectTiersAddUp();
    EXPECT_TRUE(engine_->takeLateWritten().empty());
    EXPECT_EQ(vault_->stats().sealed.load(), 5u);
    EXPECT_EQ(vault_->stats().dropped.load(), 0u);
  }
}

TEST_F(EngineTest, SealsRegionsThatSpanManyChunksAndLieAtOddAddresses) {
  commit_ = true;
  start();
  state({region("a", 1), region("b", 100'003), region("c", 63), region("d", 65)}, {}, 64);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  gateAndSettle();
  expectSealed(1, data_);
}

TEST_F(EngineTest, SnapshotOfObjectsAloneIsSealed) {
  start();
  state({});
  ASSERT_EQ(capture(1, nullptr, "only objects"), CaptureResult::kTaken);
  gateAndSettle();
  const VaultReader reader(vault_->fd());
  ASSERT_TRUE(sealed(reader, 1));
  EXPECT_EQ(reader.objects(*sealed(reader, 1)), "only objects");
}

// --- parities

// Rank 0 of four replicas, which are one set.
class ParityEngineTest : public EngineTest {
 protected:
  void replicated(const std::vector<RegionInfo>& regions, uint64_t chunk = kChunk) {
    fill(regions);
    const GroupInfo group{"g", {0, 1, 2, 3}, {{2, 0, 3, 1}}};
    table_ = buildTable(0, 4, regions, {group}, "aec", {{0, 4}}, chunk);
    engine_->setTable(table_);
  }
  // Expects that `step` is sealed with the parity of what `data_` is.
  void expectParity(int64_t step) {
    const ParityCells cells(table_, 0, 0);
    std::vector<char> expected(cells.bytes());
    for (const uint32_t shard : {1u, 2u, 3u}) {
      std::vector<ShardRange> ranges;
      cells.ranges(shard, 0, 0, cells.bytes(), ranges);
      size_t at = 0;
      for (const ShardRange& range : ranges) {
        for (uint64_t i = range.begin; i < range.end; ++i) {
          expected[at++] ^= data_[range.region][i];
        }
      }
    }
    const VaultReader reader(vault_->fd());
    const auto view = sealed(reader, step);
    ASSERT_TRUE(view.has_value()) << "step " << step;
    EXPECT_TRUE(reader.verify(*view).empty());
    uint64_t bytes = 0;
    for (const ParityPiece& piece : table_.parities) {
      ASSERT_EQ(std::memcmp(reader.payload(*view) + piece.payload_offset,
                            expected.data() + piece.begin, piece.end - piece.begin),
                0);
      bytes += piece.end - piece.begin;
    }
    EXPECT_EQ(bytes, cells.bytes());
  }
  // The region with the byte that lies at `at` of the cell of shard 1.
  ShardRange under(uint64_t at) const {
    std::vector<ShardRange> ranges;
    ParityCells(table_, 0, 0).ranges(1, 0, at, at + 1, ranges);
    return ranges.at(0);
  }
};

TEST_F(ParityEngineTest, IsThatOfTheOthersShardsForRandomRegionsAndThreads) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 60; ++round) {
    engine_.reset();
    EngineOptions options;
    options.copy_threads = 1 + round % 3;
    options.verify_full = round % 2 == 1;
    options.policy = std::array{PlacementPolicy::kEager, PlacementPolicy::kGap,
                                PlacementPolicy::kSync}[random() % 3];
    commit_ = true;
    start(options);
    std::vector<RegionInfo> regions;
    for (uint64_t i = random() % 12; i > 0; --i) {
      const int32_t group = random() % 4 == 0 ? -1 : 0;
      regions.push_back(
          region("r" + std::to_string(i), random() % 90'000, group, random() % 3 == 0));
    }
    replicated(regions, round % 5 == 0 ? 64 : kChunk);
    for (int64_t step = 1; step <= 3; ++step) {
      for (auto& d : data_) {
        for (char& c : d) {
          c = static_cast<char>(c + 1);
        }
      }
      ASSERT_EQ(capture(step), CaptureResult::kTaken);
      gateAndSettle();
      expectSealed(step, data_);
      expectParity(step);
    }
    expectTiersAddUp();
    EXPECT_TRUE(engine_->takeLateWritten().empty());
    EXPECT_EQ(vault_->stats().sealed.load(), 3u);
  }
}

// A write that moves no version counter, to what a parity covers and no piece of this rank holds.
TEST_F(ParityEngineTest, AWriteUnderAParityDropsTheSnapshotAndIsCopiedEarlyFromThenOn) {
  for (const bool full : {true, false}) {
    engine_.reset();
    commit_ = true;
    EngineOptions options;
    options.verify_full = full;
    start(options);
    std::vector<RegionInfo> regions;
    for (int i = 0; i < 8; ++i) {
      regions.push_back(region("r" + std::to_string(i), 10 * kChunk, 0));
    }
    replicated(regions);
    const auto versions = std::make_shared<FakeVersions>(regions.size(), true);
    ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
    const ShardRange at = under(5 * kChunk);
    if (full) {
      data_[at.region][at.begin] ^= 1;  // no sample may be there
    } else {
      std::fill(data_[at.region].begin(), data_[at.region].end(), 'x');
    }
    versions->release();
    gateAndSettle();
    const std::vector<uint32_t> late = engine_->takeLateWritten();
    EXPECT_EQ(vault_->stats().dropped.load(), 1u);
    EXPECT_NE(std::find(late.begin(), late.end(), at.region), late.end());
    for (const uint32_t region_of : late) {
      regions[region_of].early = true;
    }
    replicated(regions);
    ASSERT_EQ(capture(2), CaptureResult::kTaken);
    const auto before = data_;
    std::fill(data_[at.region].begin(), data_[at.region].end(), 'y');
    gateAndSettle();
    EXPECT_EQ(vault_->stats().sealed.load(), 1u);
    data_ = before;
    expectParity(2);
  }
}

TEST_F(ParityEngineTest, AMovedVersionCounterUnderAParityDropsTheSnapshot) {
  start();
  replicated({region("r0", 40 * kChunk, 0), region("r1", 40 * kChunk, 0)});
  const auto versions = std::make_shared<FakeVersions>(2, true);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  versions->bump(under(0).region);
  versions->release();
  gateAndSettle();
  EXPECT_EQ(vault_->stats().dropped.load(), 1u);
}

// --- what snapshots cost, and how often they are taken

class CadenceEngineTest : public EngineTest {
 protected:
  static constexpr int64_t kWorkNs = 10'000'000;

  ~CadenceEngineTest() override { engine_.reset(); }  // its threads read the clock

  void startMeasured(uint32_t control_every, int64_t limit_ppm = 0, bool commit = true) {
    clock_ = &time_;
    commit_ = commit;
    EngineOptions options;
    options.slot_wait = 0ns;
    options.control_every = control_every;
    options.cadence.limit_ppm = limit_ppm;
    options.cadence.decides = true;
    start(options, 3);
    state({region("early", kChunk, -1, true), region("a", 7 * kChunk)});
  }
  // Trains up to and including step `last`. A step takes a `cost` longer beside a copy, a snapshot
  // 1 ms of the program point.
  void train(int64_t last, double cost) {
    for (++step_; step_ <= last; ++step_) {
      const uint64_t at_once = vault_->stats().at_once_copied_bytes.load();
      const bool due = engine_->beginPoint(step_);
      if (due) {
        ASSERT_EQ(capture(step_), CaptureResult::kTaken) << step_;
        taken_.push_back(step_);
      }
      const bool control =
          vault_->stats().at_once_copied_bytes.load() - at_once == table_.payload_bytes;
      controls_ += control ? 1 : 0;
      if (control) {
        EXPECT_EQ(vault_->stats().sealed_step.load(), static_cast<uint64_t>(step_))
            << "sealed before the step begins";
      }
      pass(due ? kPointNs : 0);
      engine_->endPoint();
      pass(kWorkNs + (due && !control ? static_cast<int64_t>(kWorkNs * cost) - kPointNs : 0));
      engine_->gate();
    }
    --step_;
    engine_->settle();
  }
  void pass(int64_t ns) { time_.advance(std::chrono::nanoseconds(ns)); }
  static int64_t signedOf(const std::atomic<uint64_t>& value) {
    return static_cast<int64_t>(value.load());
  }

  static constexpr int64_t kPointNs = 1'000'000;
  ManualClock time_;
  int64_t step_ = 0;
  int controls_ = 0;
  std::vector<int64_t> taken_;
};

TEST_F(CadenceEngineTest, MeasuresTheOverheadAndLeavesNoSnapshotOut) {
  startMeasured(16);
  EXPECT_EQ(signedOf(vault_->stats().overhead_noise_ppm), -1) << "not known yet";
  train(300, 0.2);
  EXPECT_EQ(taken_.size(), 300u);
  EXPECT_EQ(vault_->stats().sealed.load(), 300u);
  EXPECT_EQ(engine_->committedStep(), 300);
  EXPECT_GE(controls_, 300 / 16 - 1);
  EXPECT_LT(controls_, 300 / 8);
  EXPECT_EQ(vault_->stats().every.load(), 1u);
  EXPECT_EQ(signedOf(vault_->stats().overhead_ppm), 200'000);
  EXPECT_EQ(signedOf(vault_->stats().overhead_noise_ppm), 0);
}

TEST_F(CadenceEngineTest, ControlStepsAtEveryStepStarveNoSnapshot) {
  for (const uint32_t control_every : {1u, 2u}) {
    SCOPED_TRACE(control_every);
    engine_.reset();
    step_ = controls_ = 0;
    taken_.clear();
    startMeasured(control_every, 10'000);
    train(100, 0.0);
    EXPECT_EQ(taken_.size(), 100u);
    EXPECT_EQ(vault_->stats().sealed.load(), 100u);
    EXPECT_GE(controls_, 100 / static_cast<int>(control_every) - 3);
  }
}

TEST_F(CadenceEngineTest, SnapshotsBecomeRarerAboveTheLimitAndFrequentAgain) {
  startMeasured(16, 10'000);
  train(200, 0.03);  // 3 %: every 4th step keeps to one percent
  EXPECT_EQ(vault_->stats().every.load(), 4u);
  EXPECT_EQ(vault_->stats().skipped.load(), 0u);
  EXPECT_GT(taken_.size(), 60u);
  taken_.clear();
  train(600, 0.03);
  EXPECT_EQ(taken_.size(), 100u);
  EXPECT_TRUE(
      std::all_of(taken_.begin(), taken_.end(), [](int64_t step) { return step % 4 == 0; }));
  EXPECT_EQ(engine_->committedStep(), 600);
  EXPECT_EQ(signedOf(vault_->stats().overhead_ppm), 7'500) << "of the mean step";
  train(1200, 0.0);
  EXPECT_EQ(vault_->stats().every.load(), 1u);
  EXPECT_EQ(vault_->stats().captured, vault_->stats().sealed.load());
}

TEST_F(CadenceEngineTest, WithoutALimitSnapshotsNeverBecomeRarer) {
  startMeasured(8);
  train(200, 9.0);
  EXPECT_EQ(taken_.size(), 200u);
  EXPECT_EQ(signedOf(vault_->stats().overhead_ppm), 9'000'000);
}

TEST_F(CadenceEngineTest, VotesAgainstAStepThatItCannotDecideOn) {
  startMeasured(0, 10'000, /*commit=*/false);
  ASSERT_TRUE(engine_->beginPoint(1));
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->endPoint();
  engine_->gate();
  EXPECT_FALSE(engine_->beginPoint(2))
      << "the outcome of step 1 is not known, though a slot is free";
  ASSERT_EQ(votes().size(), 2u);
  EXPECT_EQ(votes()[0].proposal, 1);
  EXPECT_EQ(votes()[1].step, 2);
  EXPECT_EQ(votes()[1].yes, 0);
  EXPECT_EQ(vault_->stats().skipped.load(), 1u);
  wire::Ballot told = votes()[0];
  told.proposal = 3;  // every 4th
  engine_->outcome(told);
  EXPECT_FALSE(engine_->beginPoint(3));
  EXPECT_EQ(votes().size(), 2u) << "known to have no snapshot: nobody votes";
  EXPECT_TRUE(engine_->beginPoint(4));
  EXPECT_EQ(vault_->stats().every.load(), 4u);
}

TEST_F(CadenceEngineTest, TheProposalLiesBesideTheSnapshot) {
  startMeasured(0, 10'000);
  ASSERT_TRUE(engine_->beginPoint(1));
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  gateAndSettle();
  const auto slots = VaultReader(vault_->fd()).rawSlots();
  EXPECT_EQ(std::count_if(slots.begin(), slots.end(),
                          [](const RawSlot& slot) { return slot.proposal == 1; }),
            1);
}

// --- when chunks are copied: time stands still unless the test moves it, so that what the copy
// thread decides does not depend on when it comes to decide

class PlacedEngineTest : public EngineTest {
 protected:
  static constexpr int64_t kStepNs = 50'000'000;

  void startPlaced(uint32_t threads = 1) {
    clock_ = &time_;
    commit_ = true;
    log_.tell(&events_);
    EngineOptions options;
    options.policy = PlacementPolicy::kGap;
    options.events = &events_;
    options.copy_threads = threads;
    start(options);
    state({region("early", 5 * kChunk, -1, true), region("a", 300 * kChunk + 11)});
  }
  void TearDown() override {
    engine_.reset();  // before the ring
  }

  void pass(int64_t ns) { time_.advance(std::chrono::nanoseconds(ns)); }
  void point() {
    OpLog::Op op;
    op.kind = OpKind::kStep;
    log_.markDone(log_.begin(op));
  }
  uint64_t beginWait() {
    OpLog::Op op;
    op.kind = OpKind::kRecv;
    op.peer = 1;
    const uint64_t ticket = log_.begin(op);
    log_.markWaitBegin(ticket);
    return ticket;
  }
  void endWait(uint64_t ticket) {
    log_.markWaitEnd(ticket);
    log_.markDone(ticket);
  }
  void learn() {
    point();
    for (int i = 0; i < 6; ++i) {
      pass(kStepNs / 5);
      const uint64_t ticket = beginWait();
      pass(3 * kStepNs / 5);
      endWait(ticket);
      pass(kStepNs / 5);
      gateAndSettle();
      point();
    }
  }
  void untilCopied(uint64_t bytes) {
    while (vault_->stats().bytes_copied.load() < bytes) {
      std::this_thread::yield();
    }
  }

  // An iteration as learn() has shown it, after the capture of `step`: all is copied in its wait.
  void copyInTheGap(int64_t step) {
    pass(kStepNs / 5);
    const uint64_t ticket = beginWait();
    untilCopied(static_cast<uint64_t>(step) * table_.payload_bytes);
    pass(3 * kStepNs / 5);
    endWait(ticket);
    pass(kStepNs / 5);
    gateAndSettle();
  }

  ManualClock time_;
  OpEvents events_;
  OpLog log_{nullptr, 64, time_};
};

TEST_F(PlacedEngineTest, CopiesInTheGapAndNothingIsLeftForTheGate) {
  startPlaced();
  learn();
  const RankStats& stats = vault_->stats();
  for (int64_t step = 1; step <= 20; ++step) {
    data_[1][0] = static_cast<char>(step);
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    copyInTheGap(step);
    expectSealed(step, data_);
    point();
  }
  EXPECT_EQ(stats.at_once_copied_bytes.load(), 20 * table_.early_bytes);
  EXPECT_EQ(stats.gap_copied_bytes.load(), 20 * (table_.payload_bytes - table_.early_bytes));
  EXPECT_EQ(stats.compute_copied_bytes + stats.communication_copied_bytes + stats.gate_copied_bytes,
            0u);
  EXPECT_EQ(stats.op_events_lost.load(), 0u);
  expectTiersAddUp();
}

TEST_F(PlacedEngineTest, TheSpanLogHasWhatWasDoneAndWhen) {
  startPlaced();
  learn();
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    copyInTheGap(step);
    point();
  }
  const VaultReader reader(vault_->fd());
  const int64_t begin = time_.nowNs() - 4 * kStepNs;
  std::map<std::pair<SpanKind, int64_t>, std::vector<Span>> found;
  for (const Span& span : SpanLogReader(reader.spanLogArea(), reader.spanLogBytes()).tail(1000)) {
    found[{span.kind, span.step}].push_back(span);
  }
  for (int64_t step = 1; step <= 4; ++step) {
    const int64_t point = begin + (step - 1) * kStepNs;
    ASSERT_EQ((found[{SpanKind::kCapture, step}].size()), 1u);
    EXPECT_EQ((found[{SpanKind::kCapture, step}][0].begin_ns), point);
    ASSERT_EQ((found[{SpanKind::kSeal, step}].size()), 1u);
    EXPECT_EQ((found[{SpanKind::kSeal, step}][0].bytes), 1u) << "sealed";
    std::map<Tier, uint64_t> bytes;
    for (const Span& span : found[{SpanKind::kCopy, step}]) {
      bytes[static_cast<Tier>(span.tier)] += span.bytes;
      if (static_cast<Tier>(span.tier) == Tier::kGap) {
        EXPECT_GE(span.begin_ns, point + kStepNs / 5);
        EXPECT_LE(span.end_ns, point + 4 * kStepNs / 5);
      }
    }
    EXPECT_EQ(bytes[Tier::kAtOnce], table_.early_bytes);
    EXPECT_EQ(bytes[Tier::kGap], table_.payload_bytes - table_.early_bytes);
  }
}

TEST_F(PlacedEngineTest, WhatIsHeldBackIsCopiedAtTheGate) {
  startPlaced(3);
  learn();
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  pass(kStepNs / 5);
  gateAndSettle();  // the wait that was foretold has not come
  expectSealed(1, data_);
  const RankStats& stats = vault_->stats();
  EXPECT_EQ(stats.gate_copied_bytes.load(), table_.payload_bytes - table_.early_bytes);
  EXPECT_EQ(stats.gap_copied_bytes + stats.compute_copied_bytes + stats.communication_copied_bytes,
            0u);
  expectTiersAddUp();
}

TEST_F(PlacedEngineTest, EndsWhileACopyIsHeldBack) {
  startPlaced();
  learn();
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  commit_ = false;  // what an engine votes while it ends comes too late for an outcome
  engine_.reset();
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
}

TEST_F(PlacedEngineTest, AStepThatDoesNotComeToItsGapIsCopiedInTheEnd) {
  startPlaced();
  learn();
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  pass(10 * kStepNs);  // an evaluation, or a hang
  events_.wake();
  untilCopied(table_.payload_bytes);
  gateAndSettle();
  expectSealed(1, data_);
  EXPECT_EQ(vault_->stats().gate_copied_bytes.load(), 0u);
}

TEST_F(PlacedEngineTest, ThePolicyCanBeChangedBetweenSnapshots) {
  startPlaced();
  learn();
  engine_->setPolicy(PlacementPolicy::kSync);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  expectSealed(1, data_);
  const RankStats& stats = vault_->stats();
  EXPECT_EQ(stats.at_once_copied_bytes.load(), table_.payload_bytes);
  EXPECT_EQ(engine_->gate(), 0);
  engine_->setPolicy(PlacementPolicy::kEager);
  point();
  ASSERT_EQ(capture(2), CaptureResult::kTaken);
  untilCopied(2 * table_.payload_bytes);
  gateAndSettle();
  expectSealed(2, data_);
  EXPECT_EQ(stats.gap_copied_bytes + stats.gate_copied_bytes, 0u);
  expectTiersAddUp();
}

TEST_F(EngineTest, DrainFinishesTheCopyInPlaceOfTheGate) {
  commit_ = true;
  start();
  state({region("a", 50'000)});
  for (int64_t step = 1; step <= 20; ++step) {
    data_[0][0] = static_cast<char>(step);
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    ASSERT_TRUE(engine_->drain(10s));
    expectSealed(step, data_);
  }
}

TEST_F(EngineTest, WriteWithAVersionBumpDropsTheSnapshotAndNamesTheRegion) {
  commit_ = true;
  start();
  state({region("a", 2 * kChunk), region("b", 40 * kChunk)});
  auto versions = std::make_shared<FakeVersions>(2, true);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  versions->waitUntilBlocked();
  data_[1][20 * kChunk] ^= 1;  // one byte: samples alone would most likely miss it
  versions->bump(1);
  versions->release();
  gateAndSettle();
  EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>({1}));
  EXPECT_TRUE(engine_->takeLateWritten().empty()) << "told once";
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
  EXPECT_EQ(vault_->stats().dropped.load(), 1u);
  ASSERT_EQ(votes().size(), 1u);
  EXPECT_EQ(votes()[0].yes, 0);
  EXPECT_NE(std::string(vault_->stats().note).find("step 1 dropped: b"), std::string::npos);
  ASSERT_EQ(capture(2), CaptureResult::kTaken) << "training and snapshots go on";
  gateAndSettle();
  expectSealed(2, data_);
}

// Counts how often the engine asks for a check, and lets a test wait for that.
class Asked {
 public:
  std::function<bool()> sink() {
    return [this] {
      const std::lock_guard lock(mutex_);
      ++count_;
      changed_.notify_all();
      return true;
    };
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

TEST_F(EngineTest, AWriteUnderWayWhileItsTensorIsCopiedIsFoundWhenTheOpHasEnded) {
  Asked asked;
  EngineOptions options;
  options.ask_check = asked.sink();
  start(options);
  state({region("a", 2 * kChunk), region("b", 40 * kChunk)});
  auto versions = std::make_shared<FakeVersions>(2, true);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  versions->waitUntilBlocked();
  data_[1][20 * kChunk] ^= 1;  // an op has begun to write; its counter does not move yet
  versions->release();
  asked.wait();  // all is copied
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty()) << "not sealed on trust";
  versions->bump(1);  // it ends: only now its counter moves
  engine_->check();
  gateAndSettle();
  EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>({1}));
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
  EXPECT_EQ(vault_->stats().dropped.load(), 1u);
}

TEST_F(EngineTest, ACheckedSnapshotIsSealedBeforeTheGate) {
  commit_ = true;
  Asked asked;
  EngineOptions options;
  options.ask_check = asked.sink();
  start(options);
  state({region("a", 2 * kChunk), region("b", 40 * kChunk)});
  auto versions = std::make_shared<FakeVersions>(2);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  asked.wait();
  engine_->check();
  engine_->check();  // a second one does no harm
  while (engine_->committedStep() != 1) {
    std::this_thread::yield();
  }
  data_[1][0] ^= 1;  // after the check: the copy is a copy
  versions->bump(1);
  gateAndSettle();
  data_[1][0] ^= 1;
  expectSealed(1, data_);
}

TEST_F(EngineTest, TheGateDoesNotWaitForTheSeal) {
  for (const bool asks : {true, false}) {
    Asked asked;
    EngineOptions options;
    options.ask_check = asks ? asked.sink() : nullptr;
    start(options);
    state({region("a", 40 * kChunk)});
    const auto before = data_;
    ASSERT_EQ(capture(1, std::make_shared<FakeVersions>(1)), CaptureResult::kTaken);
    {
      const std::lock_guard nobody_votes(mutex_);
      engine_->gate();
      data_[0][7] ^= 1;  // the optimizer
    }
    engine_->settle();
    expectSealed(1, before);
    EXPECT_EQ(vault_->stats().dropped.load(), 0u);
  }
}

TEST_F(EngineTest, WithoutACheckTheGateLooks) {
  for (const bool checkable : {true, false}) {
    EngineOptions options;
    int asked = 0;
    options.ask_check = [&asked] {
      ++asked;
      return false;
    };
    start(options);
    state({region("a", 2 * kChunk), region("b", 40 * kChunk)});
    auto versions = std::make_shared<FakeVersions>(2);
    std::vector<const void*> addresses{data_[0].data(), data_[1].data()};
    CaptureInput input{.step = 1, .addresses = addresses, .versions = versions, .objects = "small"};
    input.checkable = checkable;
    ASSERT_EQ(engine_->capture(input), CaptureResult::kTaken);
    gateAndSettle();
    expectSealed(1, data_);
    ASSERT_EQ(engine_->capture((input.step = 2, input)), CaptureResult::kTaken);
    versions->bump(0);
    gateAndSettle();
    EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>({0}));
    EXPECT_TRUE(checkable || asked == 0);
  }
}

TEST_F(EngineTest, WriteOfAWholeTensorWithoutAVersionBumpIsFoundBySamples) {
  start();
  state({region("a", 2 * kChunk), region("b", 400 * kChunk), region("c", 5 * kChunk)});
  auto versions = std::make_shared<FakeVersions>(3, true);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  versions->waitUntilBlocked();
  for (char& c : data_[1]) {
    c ^= 1;
  }
  versions->release();
  gateAndSettle();
  EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>({1}));
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
}

TEST_F(EngineTest, FullVerificationFindsOneByteWithoutAVersionBump) {
  EngineOptions options;
  options.verify_full = true;
  start(options);
  state({region("a", 2 * kChunk), region("b", 4000 * kChunk)});
  auto versions = std::make_shared<FakeVersions>(2, true);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  versions->waitUntilBlocked();
  data_[1][2222 * kChunk + 5] ^= 1;
  versions->release();
  gateAndSettle();
  EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>({1}));
}

TEST_F(EngineTest, EarlyRegionWrittenRightAfterCaptureIsStillRight) {
  commit_ = true;
  start();
  state({region("late", 10 * kChunk), region("early", 3 * kChunk + 7, -1, true)});
  const auto before = data_;
  auto versions = std::make_shared<FakeVersions>(2);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  for (char& c : data_[1]) {
    c ^= 1;
  }
  versions->bump(1);
  gateAndSettle();
  expectSealed(1, before);
  EXPECT_TRUE(engine_->takeLateWritten().empty());
}

TEST_F(EngineTest, OnlyEarlyRegionsAreSealedWhenCaptureReturns) {
  start();
  state({region("early", 3 * kChunk + 7, -1, true)});
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  expectSealed(1, data_);
  EXPECT_EQ(engine_->gate(), 0);
}

TEST_F(EngineTest, WithoutOutcomesTheThirdCaptureFindsNoSlotAndVotesDropped) {
  EngineOptions options;
  options.slot_wait = 20ms;
  start(options);
  state({region("a", 10'000)});
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    gateAndSettle();
  }
  EXPECT_EQ(capture(3), CaptureResult::kNoSlot);
  ASSERT_EQ(votes().size(), 3u);
  EXPECT_EQ(votes()[2].step, 3);
  EXPECT_EQ(votes()[2].yes, 0);
  EXPECT_EQ(vault_->stats().skipped.load(), 1u);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 2u) << "both are kept";
}

TEST_F(EngineTest, WaitsForASlotOnceAndNotAtEveryStep) {
  EngineOptions options;
  options.slot_wait = 1500ms;
  start(options);
  state({region("a", 10'000)});
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
  }
  gateAndSettle();
  EXPECT_EQ(capture(3), CaptureResult::kNoSlot);
  const auto from = std::chrono::steady_clock::now();
  for (int64_t step = 4; step <= 13; ++step) {
    EXPECT_EQ(capture(step), CaptureResult::kNoSlot);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - from, 10 * 1500ms / 2);
  outcome(1, true);
  outcome(2, true);
  EXPECT_EQ(capture(14), CaptureResult::kTaken);
  gateAndSettle();
  // Outcomes come, but always too late: ranks that do not count the same steps. Waits stay a
  // hundredth of the run.
  const auto later = std::chrono::steady_clock::now();
  for (int64_t step = 15; step <= 24; ++step) {
    EXPECT_EQ(capture(step), CaptureResult::kNoSlot);
    outcome(step, false);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - later, 1500ms);
}

TEST_F(EngineTest, WithoutAWaitForSlotsItGoesOnWhereOtherRanksDo) {
  for (const auto wait : {0ms, 1ms}) {
    EngineOptions options;
    options.slot_wait = wait;
    start(options);
    state({region("a", 10'000)});
    for (int64_t step = 1; step <= 2; ++step) {
      ASSERT_EQ(capture(step), CaptureResult::kTaken);
      gateAndSettle();
    }
    EXPECT_EQ(capture(3), CaptureResult::kNoSlot);
    EXPECT_EQ(capture(4), CaptureResult::kNoSlot);
    outcome(1, true);
    outcome(2, true);
    EXPECT_EQ(capture(5), wait == 0ms ? CaptureResult::kNoSlot : CaptureResult::kTaken);
    gateAndSettle();
    outcome(5, false);
    EXPECT_EQ(capture(8), CaptureResult::kTaken) << "of four, as two points were missed";
    gateAndSettle();
    outcome(8, true);
    EXPECT_EQ(capture(9), CaptureResult::kTaken);
    gateAndSettle();
  }
}

TEST_F(EngineTest, AbortFreesTheSlotAndCommitFreesTheOlderOne) {
  EngineOptions options;
  options.slot_wait = 1ms;
  start(options);
  state({region("a", 10'000)});
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  gateAndSettle();
  outcome(1, true);
  ASSERT_EQ(capture(2), CaptureResult::kTaken);
  gateAndSettle();
  outcome(2, false);
  ASSERT_EQ(capture(3), CaptureResult::kTaken) << "takes the aborted one";
  gateAndSettle();
  {
    const VaultReader reader(vault_->fd());
    EXPECT_TRUE(sealed(reader, 1)) << "the committed one is still there";
    EXPECT_TRUE(sealed(reader, 3));
  }
  EXPECT_EQ(capture(4), CaptureResult::kNoSlot);
  outcome(3, true);
  EXPECT_EQ(engine_->committedStep(), 3);
  ASSERT_EQ(capture(5), CaptureResult::kTaken) << "overwrites step 1";
  gateAndSettle();
  const VaultReader reader(vault_->fd());
  EXPECT_TRUE(sealed(reader, 3));
  EXPECT_TRUE(sealed(reader, 5));
}

TEST_F(EngineTest, OutcomeOfAnotherIncarnationFreesNothing) {
  EngineOptions options;
  options.slot_wait = 1ms;
  start(options);
  state({region("a", 100)});
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    gateAndSettle();
  }
  wire::Ballot ballot{};
  ballot.step = 2;
  ballot.incarnation = kInc + 1;
  ballot.yes = 1;
  engine_->outcome(ballot);
  EXPECT_EQ(engine_->committedStep(), -1);
  EXPECT_EQ(capture(3), CaptureResult::kNoSlot);
}

TEST_F(EngineTest, AdoptedSlotIsKeptUntilSomethingNewerIsCommitted) {
  EngineOptions options;
  options.slot_wait = 1ms;
  start(options);
  state({region("a", 10'000)});
  ASSERT_EQ(capture(9), CaptureResult::kTaken);
  gateAndSettle();
  UniqueFd fd(::dup(vault_->fd()));
  engine_.reset();
  const auto old = std::move(vault_);
  options.incarnation = kInc + 1;
  vault_ = Vault::adopt(std::move(fd), {"job", 0, 1});
  engine_ = std::make_unique<SnapshotEngine>(options, *vault_, [](const wire::Ballot&) {});
  engine_->adopt(0, 9, kInc);
  engine_->setTable(table_);
  const auto restored = data_;
  ASSERT_EQ(capture(3), CaptureResult::kTaken) << "an older step number, of the new incarnation";
  gateAndSettle();
  expectSealed(9, restored);
  EXPECT_EQ(capture(4), CaptureResult::kNoSlot);
  expectSealed(9, restored);
  wire::Ballot ballot{};
  ballot.step = 3;
  ballot.incarnation = kInc + 1;
  ballot.yes = 1;
  engine_->outcome(ballot);
  ASSERT_EQ(capture(5), CaptureResult::kTaken);
  gateAndSettle();
  EXPECT_FALSE(sealed(VaultReader(vault_->fd()), 9));
}

TEST_F(EngineTest, ObjectsLargerThanTheirAreaGrowTheSlotAndRarely) {
  EngineOptions options;
  options.object_bytes = 4096;
  commit_ = true;
  start(options);
  state({region("a", 10'000)});
  int moved = 0;
  uint64_t bytes = vault_->bytes();
  for (int64_t step = 1; step <= 200; ++step) {
    const std::string objects(static_cast<size_t>(step) * 1000, static_cast<char>('a' + step % 26));
    ASSERT_EQ(capture(step, nullptr, objects), CaptureResult::kTaken);
    gateAndSettle();
    expectSealed(step, data_);
    const VaultReader reader(vault_->fd());
    ASSERT_EQ(reader.objects(*sealed(reader, step)), objects);
    moved += vault_->bytes() != bytes ? 1 : 0;
    bytes = vault_->bytes();
  }
  EXPECT_LE(moved, 16) << "two slots, doubled from 4 KB to 400 KB";
}

TEST_F(EngineTest, NewTableKeepsTheCommittedSnapshotReadable) {
  commit_ = true;
  start();
  state({region("a", 10'000)});
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  gateAndSettle();
  const auto old = data_;
  state({region("a", 200'000), region("b", 300'000)});
  expectSealed(1, old);
  ASSERT_EQ(capture(2), CaptureResult::kTaken);
  gateAndSettle();
  expectSealed(1, old);
  expectSealed(2, data_);
  for (int64_t step = 3; step <= 6; ++step) {
    data_[1][5] = static_cast<char>(step);
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    gateAndSettle();
    expectSealed(step, data_);
  }
  state({region("a", 5)});
  ASSERT_EQ(capture(7), CaptureResult::kTaken);
  gateAndSettle();
  expectSealed(7, data_);
}

TEST_F(EngineTest, WithoutMemoryForTheSlotsThereAreNoSnapshotsAndNoHarm) {
  start();
  data_.resize(1);
  EXPECT_THROW(engine_->setTable(buildTable(0, 1, {region("huge", uint64_t{1} << 60)}, {}, "none",
                                            {}, uint64_t{1} << 50)),
               SystemError);
  EXPECT_FALSE(engine_->hasTable());
  EXPECT_EQ(capture(1), CaptureResult::kNoTable);
  EXPECT_EQ(engine_->gate(), 0);
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty()) << "the vault can still be read";
  state({region("a", 100)});
  EXPECT_EQ(capture(1), CaptureResult::kTaken);
}

TEST_F(EngineTest, MisuseOfCaptureDoesNotThrow) {
  commit_ = true;
  start();
  EXPECT_EQ(capture(1), CaptureResult::kNoTable);
  state({region("a", 100)});
  EXPECT_EQ(capture(5), CaptureResult::kTaken);
  gateAndSettle();
  EXPECT_EQ(capture(5), CaptureResult::kFailed);
  EXPECT_EQ(capture(4), CaptureResult::kFailed);
  EXPECT_EQ(votes().size(), 1u) << "the vote for step 5 stands";
  expectSealed(5, data_);
  data_.emplace_back(3);
  EXPECT_EQ(capture(6), CaptureResult::kNoTable);
}

TEST_F(EngineTest, DestructorStopsARunningCopyAndLeavesItUnsealed) {
  for (int round = 0; round < 20; ++round) {
    EngineOptions options;
    options.copy_threads = 1 + round % 3;
    start(options);
    state({region("a", 2 * kChunk), region("b", 300 * kChunk)});
    auto versions = std::make_shared<FakeVersions>(2, true);
    ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
    versions->waitUntilBlocked();
    std::thread later([&] { versions->release(); });
    engine_.reset();
    later.join();
    for (const SlotView& view : VaultReader(vault_->fd()).slots()) {
      EXPECT_TRUE(VaultReader(vault_->fd()).verify(view).empty())
          << "if it was sealed in time, then whole";
    }
  }
}

TEST_F(EngineTest, DrainWaitsForTheOutcomeOrTheDeadline) {
  start();
  state({region("a", 100)});
  EXPECT_TRUE(engine_->drain(1ms)) << "nothing captured";
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  EXPECT_FALSE(engine_->drain(1ms));
  std::thread agent([&] { outcome(1, true); });
  EXPECT_TRUE(engine_->drain(10s));
  agent.join();
}

// Replicas that hold other private regions besides must still record equal digests: a difference
// would be taken for silent data corruption at restore.
TEST_F(EngineTest, GroupDigestDoesNotDependOnThePrivateRegionsOfARank) {
  const std::vector<char> shared(50'000, 's');
  const std::vector<char> mine(3'000, 'm');
  std::vector<uint64_t> digests;
  for (const bool with_private : {false, true}) {
    start();
    std::vector<RegionInfo> regions = {region("shared", shared.size(), 0)};
    std::vector<const void*> addresses = {shared.data()};
    if (with_private) {
      regions.insert(regions.begin(), region("mine", mine.size()));
      addresses.insert(addresses.begin(), mine.data());
    }
    engine_->setTable(buildTable(0, 2, regions, {{"g", {0, 1}}}, "none", {}, kChunk));
    ASSERT_EQ(engine_->capture({1, addresses, nullptr, ""}), CaptureResult::kTaken);
    gateAndSettle();
    digests.push_back(VaultReader(vault_->fd()).slots().at(0).group_digests.at(0));
    engine_.reset();
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(EngineTest, TheCutGoesIntoTheSlotAndTheVote) {
  start();
  state({region("a", 10'000)});
  CaptureInput input{1, {}, nullptr, ""};
  const void* address = data_[0].data();
  input.addresses = {&address, 1};
  input.cut = 4711;
  ASSERT_EQ(engine_->capture(input), CaptureResult::kTaken);
  gateAndSettle();
  EXPECT_EQ(VaultReader(vault_->fd()).slots().at(0).cut, 4711u);
  EXPECT_EQ(votes().back().cut, 4711u);
}

TEST_F(EngineTest, AlarmTellsThatCollectivesRunWithoutACommit) {
  EngineOptions options;
  std::atomic<uint64_t> ops{0};
  std::mutex mutex;
  std::condition_variable told;
  std::vector<bool> alarms;
  options.alarm = 1s;
  options.incarnation = kInc;
  options.ops_begun = [&] { return ++ops; };
  options.on_alarm = [&](bool unprotected) {
    const std::lock_guard lock(mutex);
    alarms.push_back(unprotected);
    told.notify_all();
  };
  ManualClock clock;
  vault_ = Vault::create({"job", 0, 1}, 2, 64);
  engine_ = std::make_unique<SnapshotEngine>(
      options, *vault_, [](const wire::Ballot&) {}, clock);
  clock.advance(2s);
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(told.wait_for(lock, 60s, [&] { return alarms.size() == 1; }));
    EXPECT_TRUE(alarms[0]);
    EXPECT_EQ(vault_->stats().unprotected.load(), 1u);
  }
  outcome(1, true);
  std::unique_lock lock(mutex);
  ASSERT_TRUE(told.wait_for(lock, 60s, [&] { return alarms.size() == 2; }));
  EXPECT_FALSE(alarms[1]);
  lock.unlock();
  engine_.reset();
}

TEST_F(EngineTest, SnapshotsThatAreAsRareAsAskedAreNoReasonForAnAlarm) {
  constexpr int64_t kEvery = 2;
  constexpr int64_t kRestored = 1000;
  EngineOptions options;
  std::atomic<uint64_t> checks{0};
  std::atomic<int> alarms{0};
  options.alarm = 1s;
  options.incarnation = kInc;
  options.cadence.base = kEvery;
  options.ops_begun = [&] { return ++checks; };
  options.on_alarm = [&](bool) { ++alarms; };
  ManualClock clock;
  vault_ = Vault::create({"job", 0, 1}, 2, 64);
  engine_ = std::make_unique<SnapshotEngine>(
      options, *vault_, [](const wire::Ballot&) {}, clock);
  const auto after = [&](int64_t step) {
    clock.advance(900ms);
    engine_->beginPoint(step);
    engine_->endPoint();
    for (const uint64_t before = checks.load(); checks.load() < before + 2;) {
      std::this_thread::yield();  // the first of them may have begun before the point
    }
    return alarms.load();
  };
  // Nothing is adopted: this rank's vault was lost, others' have put it back.
  for (int64_t step = kRestored + 1; step <= kRestored + kEvery; ++step) {
    EXPECT_EQ(after(step), 0) << step;
  }
  const int64_t committed = kRestored + kEvery;
  outcome(committed, true);
  for (int64_t step = committed + 1; step <= committed + kEvery + 1; ++step) {
    EXPECT_EQ(after(step), 0) << step;
  }
  EXPECT_EQ(after(committed + kEvery + 2), 1) << "step 1004 was not committed";
  engine_.reset();
}

uint64_t residentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total = 0;
  uint64_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Another process reads all the time. What it finds sealed before and after it read is one whole
// snapshot.
TEST(EngineAndReaderProcess, ReaderSeesOnlyWholeSnapshotsAndMemoryStaysFlat) {
  constexpr int64_t kSteps = kSanitized ? 300 : 2000;
  constexpr uint64_t kBytes = 40'000;
  auto vault = Vault::create({"job", 0, 1}, 2, 64);
  auto* stop = static_cast<std::atomic<int>*>(
      ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(stop), MAP_FAILED);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    VaultReader reader(vault->fd());
    uint64_t whole = 0;
    std::vector<char> copy;
    while (true) {
      const bool last = stop->load() != 0;
      reader.refresh();
      for (const SlotView& view : reader.slots()) {
        const auto* payload = reinterpret_cast<const char*>(reader.payload(view));
        copy.assign(payload, payload + view.payload_bytes);
        std::string objects;
        bool intact = true;
        try {
          objects = reader.objects(view);
          intact = reader.verify(view).empty();
        } catch (const Corruption&) {
          intact = false;
        }
        if (!reader.isUnchanged(view)) {
          continue;
        }
        if (!intact || objects != std::to_string(view.step)) {
          ::_exit(1);
        }
        for (uint64_t i = 0; i < kBytes; ++i) {
          if (copy[i] != static_cast<char>(view.step)) {
            ::_exit(2);
          }
        }
        ++whole;
      }
      if (last) {
        ::_exit(whole > 0 ? 0 : 3);
      }
    }
  }
  ASSERT_GT(child, 0);
  {
    SnapshotEngine* voter = nullptr;
    EngineOptions options;
    options.copy_threads = 2;
    const auto engine = std::make_unique<SnapshotEngine>(
        options, *vault, [&](const wire::Ballot& ballot) { voter->outcome(ballot); });
    voter = engine.get();
    std::vector<char> data(kBytes);
    engine->setTable(buildTable(0, 1, {region("a", kBytes)}, {}, "none", {}, kChunk));
    uint64_t resident = 0;
    for (int64_t step = 1; step <= kSteps; ++step) {
      std::memset(data.data(), static_cast<char>(step), data.size());
      const void* address = data.data();
      ASSERT_EQ(engine->capture({step, {&address, 1}, nullptr, std::to_string(step)}),
                CaptureResult::kTaken);
      engine->gate();
      if (step == kSteps / 4) {
        resident = residentBytes();
      }
    }
    engine->settle();
    EXPECT_EQ(vault->stats().sealed.load(), static_cast<uint64_t>(kSteps));
    if (!kSanitized) {
      EXPECT_LT(residentBytes(), resident + (1 << 20));
    }
  }
  stop->store(1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ::munmap(stop, kPage);
}

}  // namespace engine_test
}  // namespace reft
