// What the engine learns from a device's own times, over a driver whose times the test gives: what
// snapshots cost, where the time went, how much it asks for at once.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "snapshot/engine/engine.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "snapshot/vault/span_log.h"
#include "tests/fakes/scripted_driver.h"

namespace reft {
namespace engine_device_times_test {

constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kChunk = 4096;
constexpr uint64_t kInc = 5;
constexpr DeviceStream kStream{0, ScriptedDriver::kTraining};

class EngineDeviceTimes : public testing::Test {
 protected:
  void start(uint64_t bytes, EngineOptions options = {}) {
    options.incarnation = kInc;
    options.cuda = &api_;
    options.device_marks = &marks_;
    vault_ = Vault::create({"job", 0, 1}, 2, 64);
    engine_ = std::make_unique<SnapshotEngine>(
        options, *vault_,
        [this](const wire::Ballot& ballot) {
          engine_->outcome(ballot);  // everybody agrees
        },
        host_);
    control_.emplace(options.control_every);
    memory_.assign(bytes, 0);
    table_ = buildTable(0, 1, {{"r", "uint8", {static_cast<int64_t>(bytes)}, bytes, 1, -1, false}},
                        {}, "none", {}, kChunk);
    engine_->setTable(table_);
  }
  void TearDown() override { engine_.reset(); }
  CaptureResult capture(int64_t step) {
    const void* const address = memory_.data();
    const int device = 0;
    CaptureInput input;
    input.step = step;
    input.addresses = {&address, 1};
    input.devices = {&device, 1};
    input.streams = {&kStream, 1};
    input.objects = "small";
    return engine_->capture(input);
  }
  int64_t copies() {
    const std::lock_guard lock(driver_.mutex);
    int64_t copies = 0;
    for (const auto& [thread, count] : driver_.copies) {
      copies += count;
    }
    return copies;
  }
  int64_t chunksUntil(int64_t step) const {
    return step * static_cast<int64_t>(table_.payload_bytes / kChunk);
  }
  void pass(int64_t ns) {
    const std::lock_guard lock(driver_.mutex);
    driver_.enqueued_ns += ns;
  }
  // A step that takes `cost` times as long beside a copy; the device keeps up with the host.
  // Returns whether it had a snapshot.
  bool step(double cost) {
    if (++step_ == 1) {
      control_->beginAt(4);
    }
    const bool due = engine_->beginPoint(step_, {&kStream, 1});
    every_ = vault_->stats().every.load();
    std::memset(memory_.data(), static_cast<int>(step_), memory_.size());
    EXPECT_EQ(due ? capture(step_) : CaptureResult::kTaken, CaptureResult::kTaken);
    if (step_ == 1) {
      control_->lengthen(8);
    }
    const bool control = due && every_ == 1 && control_->drawn(step_);
    controls_ += control ? 1 : 0;
    engine_->endPoint();
    for (uint64_t wait = 0; wait < waits_in_step_; ++wait) {
      const OpEvent begin{
          .what = OpEvent::kWaitBegin, .kind = OpKind::kRecv, .peer = 1, .bytes = 64};
      const bool marked = marks_.markWait(begin, kStream);
      pass(wait_ns_);
      if (marked) {
        OpEvent end = begin;
        end.what = OpEvent::kWaitEnd;
        marks_.mark(end, kStream);
      }
    }
    pass(static_cast<int64_t>(kWorkNs * (due && !control ? cost : 1.0)) -
         static_cast<int64_t>(waits_in_step_) * wait_ns_);
    while (await_copies_ && due && !control && copies() < chunksUntil(step_)) {
      std::this_thread::yield();
    }
    engine_->gate({&kStream, 1});
    driver_.comeToTheEnd();
    EXPECT_TRUE(engine_->settle());
    return due;
  }
  // Steps until that holds; the copy thread takes in the device's times when it comes to it.
  template <typename Holds>
  bool trainUntil(Holds holds, double cost, int most = 5000) {
    for (int i = 0; i < most && !holds(); ++i) {
      step(cost);
    }
    return holds();
  }
  int64_t overheadPpm() const { return static_cast<int64_t>(vault_->stats().overhead_ppm.load()); }
  bool known() const {
    return static_cast<int64_t>(vault_->stats().overhead_noise_ppm.load()) >= 0;
  }
  std::vector<Span> spans(SpanKind kind) const {
    const VaultReader reader(vault_->fd());
    std::vector<Span> found;
    for (const Span& span :
         SpanLogReader(reader.spanLogArea(), reader.spanLogBytes()).tail(10'000)) {
      if (span.kind == kind) {
        found.push_back(span);
      }
    }
    return found;
  }

  static constexpr int64_t kWorkNs = 10 * kMs;
  ScriptedDriver driver_;
  CudaApi api_ = driver_.api();
  ClockOfDevice host_{driver_, 777 * kMs};
  DeviceMarks marks_;
  std::optional<ControlSteps> control_;  // which steps the engine is to take for its control
  uint64_t every_ = 1;
  std::vector<unsigned char> memory_;
  SnapshotTable table_;
  std::unique_ptr<Vault> vault_;
  std::unique_ptr<SnapshotEngine> engine_;
  bool await_copies_ = false;  // the copy thread asks for all of them, not the gate
  uint64_t waits_in_step_ = 0;
  int64_t wait_ns_ = 1000;
  int64_t step_ = 0;
  int controls_ = 0;
};

TEST_F(EngineDeviceTimes, MeasuresTheOverheadAndLeavesNoSnapshotOut) {
  EngineOptions options;
  options.control_every = 16;
  driver_.copy_ns_per_byte =
      3.0 * kMs / (16 * kChunk);  // 3 ms, for which a control step's stream waits at the gate
  start(16 * kChunk, options);
  ASSERT_TRUE(trainUntil([&] { return known(); }, 1.2));
  EXPECT_EQ(overheadPpm(), 200'000);
  EXPECT_EQ(vault_->stats().sealed.load(), static_cast<uint64_t>(step_))
      << "a snapshot at every step";
  const int soon = controls_;
  EXPECT_GE(soon, 5);
  const int64_t known_at = step_;
  trainUntil([&] { return step_ == known_at + 16 * 8 * 4; }, 1.2);
  EXPECT_GE(controls_ - soon, 3);
  EXPECT_LE(controls_ - soon, 6) << "rarer than on a processor";
  EXPECT_EQ(overheadPpm(), 200'000);
  EXPECT_EQ(vault_->stats().device_gate_ns.load(), controls_ * 3ull * kMs) << "of no other step";
}

TEST_F(EngineDeviceTimes, SnapshotsBecomeRarerAboveTheLimitAndFrequentAgain) {
  EngineOptions options;
  options.control_every = 16;
  options.cadence.limit_ppm = 10'000;
  options.cadence.decides = true;
  start(16 * kChunk, options);
  const auto every = [&] { return vault_->stats().every.load(); };
  ASSERT_TRUE(trainUntil([&] { return every() == 4; }, 1.03))
      << "3 %: every 4th step keeps to one percent";
  int taken = 0;
  for (int i = 0; i < 400; ++i) {
    taken += step(1.03) ? 1 : 0;
  }
  EXPECT_EQ(taken, 100);
  EXPECT_EQ(overheadPpm(), 7'500) << "of the mean step";
  EXPECT_TRUE(trainUntil([&] { return every() == 1; }, 1.0));
  EXPECT_EQ(vault_->stats().skipped.load(), 0u);
}

TEST_F(EngineDeviceTimes, ASyncSnapshotHoldsTheDeviceBackAndNotTheHost) {
  EngineOptions options;
  options.policy = PlacementPolicy::kSync;
  driver_.copy_ns_per_byte = 3.0 * kMs / (16 * kChunk);
  start(16 * kChunk, options);
  for (int i = 0; i < 20; ++i) {
    const int64_t before = driver_.enqueued_ns;
    step(1.0);
    EXPECT_EQ(driver_.enqueued_ns - before, 13 * kMs);
    std::memset(memory_.data(), 0,
                memory_.size());  // written behind the copy, so nothing is wrong with it
  }
  EXPECT_EQ(vault_->stats().sealed.load(), 20u);
}

TEST_F(EngineDeviceTimes, TellsWhereTheTimeOfADevicesStepWent) {
  driver_.copy_ns_per_byte = 12.0 * kMs / (16 * kChunk);  // 12 ms of which the step has 10
  start(16 * kChunk);
  const RankStats& stats = vault_->stats();
  ASSERT_TRUE(trainUntil([&] { return stats.gate_copied_bytes.load() != 0; }, 1.0));
  EXPECT_NEAR(static_cast<double>(stats.device_gate_last_ns.load()), 2.0 * kMs, 1000);
  const double beside = static_cast<double>(stats.compute_copied_bytes.load());
  EXPECT_NEAR(beside / static_cast<double>(stats.gate_copied_bytes.load()), 5.0, 0.01);
  const auto steps = spans(SpanKind::kDeviceStep);
  const auto gates = spans(SpanKind::kDeviceGate);
  ASSERT_FALSE(steps.empty());
  ASSERT_EQ(gates.size(), steps.size());
  EXPECT_NEAR(static_cast<double>(steps[0].end_ns - steps[0].begin_ns), 12.0 * kMs, 1000);
  EXPECT_NEAR(static_cast<double>(gates[0].end_ns - gates[0].begin_ns), 2.0 * kMs, 1000);
  EXPECT_NEAR(static_cast<double>(gates[0].end_ns), static_cast<double>(steps[0].end_ns), 1000);
  uint64_t bytes = 0;
  for (const Span& copy : spans(SpanKind::kCopy)) {
    bytes += copy.step == steps[0].step ? copy.bytes : 0;
  }
  EXPECT_EQ(bytes, table_.payload_bytes);
}

TEST_F(EngineDeviceTimes, WaitsAreToldWithWhatTheyWaitFor) {
  start(16 * kChunk);
  ASSERT_TRUE(trainUntil(
      [&] {
        engine_->beginPoint(++step_, {&kStream, 1});
        EXPECT_EQ(capture(step_), CaptureResult::kTaken);
        engine_->endPoint();
        for (const uint64_t bytes : {64u, 1u << 20}) {
          pass(2 * kMs);
          const OpEvent wait{
              .what = OpEvent::kWaitBegin, .kind = OpKind::kAllreduce, .bytes = bytes};
          marks_.markWait(wait, kStream);
          pass(3 * kMs);
          OpEvent end = wait;
          end.what = OpEvent::kWaitEnd;
          marks_.markWait(end, kStream);
        }
        engine_->gate({&kStream, 1});
        driver_.comeToTheEnd();
        EXPECT_TRUE(engine_->settle());
        return !spans(SpanKind::kDeviceWait).empty();
      },
      1.0));
  const auto waits = spans(SpanKind::kDeviceWait);
  ASSERT_GE(waits.size(), 2u);
  EXPECT_EQ(waits[0].op, static_cast<uint8_t>(OpKind::kAllreduce));
  EXPECT_EQ(waits[0].tier, static_cast<uint8_t>(Tier::kGap))
      << "a small collective: what is waited for are other ranks";
  EXPECT_EQ(waits[1].tier, static_cast<uint8_t>(Tier::kCommunication));
  EXPECT_EQ(waits[1].bytes, 1u << 20);
  EXPECT_NEAR(static_cast<double>(waits[1].end_ns - waits[1].begin_ns), 3.0 * kMs, 1000);
}

TEST_F(EngineDeviceTimes, UnderSyncTheCopyIsACostAndIsMeasured) {
  EngineOptions options;
  options.policy = PlacementPolicy::kSync;
  options.control_every = 16;
  driver_.copy_ns_per_byte = 3.0 * kMs / (16 * kChunk);
  start(16 * kChunk, options);
  ASSERT_TRUE(trainUntil([&] { return known(); }, 1.0));
  EXPECT_EQ(overheadPpm(), 300'000);
}

// Each look of the copy thread may ask for a few copies more: that shall not use up the events.
TEST_F(EngineDeviceTimes, SnapshotsOfVeryManyChunksAreMeasured) {
  EngineOptions options;
  options.control_every = 8;
  start(3000 * kChunk, options);
  await_copies_ = true;
  EXPECT_TRUE(trainUntil([&] { return known(); }, 1.1, 120));
  EXPECT_EQ(marks_.lost(), 0u);
  EXPECT_LT(driver_.recorded / step_, 150) << "events in a step";
  const RankStats& stats = vault_->stats();
  uint64_t told = 0;
  for (const auto* const bytes :
       {&stats.at_once_copied_bytes, &stats.gap_copied_bytes, &stats.compute_copied_bytes,
        &stats.communication_copied_bytes, &stats.gate_copied_bytes}) {
    told += bytes->load();
  }
  EXPECT_GE(told + 2 * table_.payload_bytes, stats.bytes_copied.load())
      << "all but those of the newest steps";
  EXPECT_LE(told, stats.bytes_copied.load());
}

TEST_F(EngineDeviceTimes, AStepOfVeryManyWaitsHasABeginningAndAnEnd) {
  EngineOptions options;
  options.control_every = 8;
  start(16 * kChunk, options);
  waits_in_step_ = 5000;
  ASSERT_TRUE(trainUntil([&] { return known(); }, 1.1, 120));
  EXPECT_EQ(overheadPpm(), 100'000);
  EXPECT_GT(marks_.lost(), 0u);
}

TEST_F(EngineDeviceTimes, RareSnapshotsAreCopiedInGapsToo) {
  for (const uint32_t every : {1u, 2u, 4u}) {
    SCOPED_TRACE(every);
    engine_.reset();
    step_ = 0;
    EngineOptions options;
    options.policy = PlacementPolicy::kGap;
    options.cadence.base = every;
    start(16 * kChunk, options);
    waits_in_step_ = 3;
    wait_ns_ = 2 * kMs;
    trainUntil([&] { return step_ == 60; }, 1.0);
    const RankStats& stats = vault_->stats();
    const uint64_t copied = stats.bytes_copied.load();
    const uint64_t in_gaps = stats.gap_copied_bytes.load();
    trainUntil([&] { return step_ == 260; }, 1.0);
    EXPECT_GT(static_cast<double>(stats.gap_copied_bytes.load() - in_gaps),
              0.9 * static_cast<double>(stats.bytes_copied.load() - copied));
  }
}

// A stream takes only so many calls before the next one waits in the driver, and with it the thread
// that trains.
TEST_F(EngineDeviceTimes, OnlySoManyCopiesAreAskedForBeforeSomeHaveLanded) {
  start(1000 * kChunk);
  {
    // Not even at the program point, for which the copy thread polls. It reads the clock already.
    const std::lock_guard lock(driver_.mutex);
    driver_.device_ns = -1;
  }
  ASSERT_TRUE(engine_->beginPoint(1, {&kStream, 1}));
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->endPoint();
  const auto seen = [&](int& queried) {
    const int64_t seen = copies();
    const std::lock_guard lock(driver_.mutex);
    queried = driver_.queried;
    return seen;
  };
  int queried = 0;
  while (seen(queried) < 256) {
    std::this_thread::yield();
  }
  const int enough =
      queried + 50;  // looks of the copy thread, after each of which it could have asked for more
  while (seen(queried) == 256 && queried < enough) {
    std::this_thread::yield();
  }
  EXPECT_EQ(seen(queried), 256);
  engine_->gate({&kStream, 1});
  driver_.comeToTheEnd();
  ASSERT_TRUE(engine_->settle());
  EXPECT_EQ(vault_->stats().sealed.load(), 1u);
}

}  // namespace engine_device_times_test
}  // namespace reft
