// The placement behind the waits of a device, over a driver whose events are passed when the test
// says so: no thread, no clock.
#include "snapshot/device/device_placement.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "tests/fakes/scripted_driver.h"

namespace reft {
namespace device_placement_test {

constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kChunk = 1000;
constexpr uint64_t kBytes = 40 * kChunk;
constexpr int64_t kAheadNs = 5'000 * kMs;  // the host's clock

// A step of 30 ms: 5 of work, a wait of 10 for a message, 5 of work, a wait of 6, 4 of work; the
// copy rate is 1 chunk per 0.2 ms.
class DevicePlacementTest : public testing::Test {
 protected:
  void wait(OpEvent::What what, int peer) {
    const OpEvent mark{.what = what, .kind = OpKind::kRecv, .peer = peer, .bytes = 64};
    what == OpEvent::kWaitBegin ? marks_.markWait(mark, kStream) : marks_.mark(mark, kStream);
  }
  struct Given {
    uint64_t bytes;
    Tier tier;
    std::optional<int64_t> behind_ns;  // since the step's program point
  };
  uint32_t stamp() {
    const auto mark = placement_->takeMark();
    if (!mark) {
      throw std::runtime_error("no event is left");
    }
    driver_.times[placement_->event(*mark)] = driver_.copies_until_ns;
    return *mark;
  }
  // What would be ordered, with the copies made where they are ordered.
  std::vector<Given> take(int64_t step) {
    std::vector<Given> given;
    while (const auto order = placement_->next(step)) {
      const int64_t from =
          order->behind ? driver_.times.at(placement_->event(*order->behind)) : point_ns_;
      given.push_back({order->bytes, order->tier,
                       order->behind ? std::optional<int64_t>(from - point_ns_) : std::nullopt});
      copy(*order, from);
    }
    return given;
  }
  void copy(const DevicePlacement::Order& order, int64_t from_ns) {
    driver_.copies_until_ns = std::max(driver_.copies_until_ns, from_ns);
    const uint32_t begin = stamp();
    driver_.copies_until_ns += static_cast<int64_t>(order.bytes / kChunk) * kMs / 5;
    placement_->ordered(order, order.bytes, begin, stamp());
  }
  bool point(int64_t number) {
    point_ns_ = driver_.enqueued_ns;
    return placement_->point(kStream, number);
  }
  void gate() {
    placement_->gateBegin(kStream);
    driver_.enqueued_ns = std::max(driver_.enqueued_ns, driver_.copies_until_ns);
    placement_->gateEnd(kStream);
    driver_.enqueued_ns += kMs / 2;
  }
  void work(int64_t first_wait_ns = 10 * kMs) {
    driver_.enqueued_ns += 5 * kMs;
    wait(OpEvent::kWaitBegin, 1);
    driver_.enqueued_ns += first_wait_ns;
    wait(OpEvent::kWaitEnd, 1);
    driver_.enqueued_ns += 5 * kMs;
    wait(OpEvent::kWaitBegin, 2);
    driver_.enqueued_ns += 6 * kMs;
    wait(OpEvent::kWaitEnd, 2);
    driver_.enqueued_ns += 4 * kMs;
  }
  std::vector<Given> step(int64_t number, int64_t first_wait_ns = 10 * kMs,
                          uint64_t bytes = kBytes) {
    EXPECT_TRUE(point(number));
    placement_->begin(policy_, kChunk, bytes);
    placement_->pointDone(/*block=*/number, /*beside_copy=*/true, 0, 0);
    work(first_wait_ns);
    const auto given = take(number);
    gate();
    return given;
  }
  // Of a step without a snapshot, which ends the one before.
  void nextPoint(int64_t number) {
    EXPECT_TRUE(point(number));
    placement_->pointDone(/*block=*/0, /*beside_copy=*/false, 0, 0);
  }
  void deviceComes() {
    driver_.comeToTheEnd();
    placement_->learn();
  }
  void learnSteps(int64_t count) {
    for (int64_t number = 1; number <= count; ++number) {
      step(number);
      deviceComes();
    }
  }
  // Of steps of which the device has passed the end.
  std::vector<DeviceStep> steps() {
    deviceComes();
    return placement_->takeSteps();
  }

  static constexpr DeviceStream kStream{0, ScriptedDriver::kTraining};
  ScriptedDriver driver_;
  ClockOfDevice host_{driver_, kAheadNs};
  CudaApi api_ = driver_.api();
  DeviceMarks marks_;
  DeviceCopy copy_{api_};
  std::optional<DevicePlacement> placement_{std::in_place, copy_, marks_, host_};
  PlacementPolicy policy_ = PlacementPolicy::kGap;
  int64_t point_ns_ = 0;
};

TEST_F(DevicePlacementTest, NothingIsKnownSoEverythingIsOrderedAtOnce) {
  const auto given = step(1);
  ASSERT_EQ(given.size(), 1u);
  EXPECT_EQ(given[0].bytes, kBytes);
  EXPECT_EQ(given[0].tier, Tier::kCompute);
  EXPECT_FALSE(given[0].behind_ns.has_value());
}

TEST_F(DevicePlacementTest, OrdersWhatFitsBehindTheWaits) {
  learnSteps(8);
  const auto given = step(9);  // 40 chunks take 8 of 16 ms
  ASSERT_EQ(given.size(), 2u);
  EXPECT_EQ(given[0].behind_ns, 5 * kMs);
  EXPECT_EQ(given[1].behind_ns, 20 * kMs);
  EXPECT_EQ(given[0].tier, Tier::kGap);
  EXPECT_EQ(given[0].bytes + given[1].bytes, kBytes);
  EXPECT_GT(given[0].bytes, given[1].bytes);  // in proportion to their room
  deviceComes();
  EXPECT_EQ(placement_->longestOverrunNs(), 0);
  EXPECT_LT(placement_->errors().recent_median, 0.1);
}

TEST_F(DevicePlacementTest, WhatDoesNotFitIsOrderedAtOnce) {
  learnSteps(8);
  EXPECT_EQ(step(9, 10 * kMs, 100 * kChunk).size(), 1u)
      << "another snapshot: it is known from the next step on what fits";
  deviceComes();
  const auto given = step(10, 10 * kMs, 100 * kChunk);  // 20 ms
  ASSERT_EQ(given.size(), 3u);
  EXPECT_FALSE(given[0].behind_ns.has_value());
  EXPECT_EQ(given[0].tier, Tier::kCompute);
  EXPECT_EQ(given[0].bytes + given[1].bytes + given[2].bytes, 100 * kChunk);
  EXPECT_GE(given[0].bytes, 20 * kChunk);
}

TEST_F(DevicePlacementTest, UnderTheOtherPoliciesEverythingIsOrderedAtOnceWhateverIsKnown) {
  learnSteps(8);
  for (const auto& [policy, tier] : {std::pair{PlacementPolicy::kEager, Tier::kCompute},
                                     std::pair{PlacementPolicy::kSync, Tier::kAtOnce}}) {
    policy_ = policy;
    const auto given = step(9 + static_cast<int64_t>(policy));
    ASSERT_EQ(given.size(), 1u);
    EXPECT_EQ(given[0].bytes, kBytes);
    EXPECT_EQ(given[0].tier, tier);
    EXPECT_FALSE(given[0].behind_ns.has_value());
  }
}

TEST_F(DevicePlacementTest, TheHostMayBeStepsAheadOfTheDevice) {
  learnSteps(8);
  for (int64_t number = 9; number <= 12; ++number) {
    EXPECT_EQ(step(number).size(), 2u);  // by what was learnt before
    placement_->learn();                 // and the device has come to nothing of it
  }
  deviceComes();
  EXPECT_EQ(step(13).size(), 2u);
}

TEST_F(DevicePlacementTest, LearnsAnotherLength) {
  learnSteps(8);
  int64_t number = 9;
  for (; number <= 12; ++number) {
    step(number, 2 * kMs);
    deviceComes();
  }
  const auto given = step(number, 2 * kMs);
  ASSERT_GE(given.size(), 2u);
  for (const Given& one : given) {
    if (one.behind_ns == 5 * kMs) {
      EXPECT_LE(one.bytes, 10 * kChunk);  // what 2 ms hold
    }
  }
}

TEST_F(DevicePlacementTest, AWaitThatDoesNotComeIsNotOrderedBehind) {
  learnSteps(8);
  EXPECT_TRUE(point(9));
  placement_->begin(policy_, kChunk, kBytes);
  driver_.enqueued_ns += 5 * kMs;
  wait(OpEvent::kWaitBegin, 1);
  wait(OpEvent::kWaitEnd, 1);
  EXPECT_EQ(take(9).size(), 1u);
  EXPECT_TRUE(point(10));
  placement_->begin(policy_, kChunk, kBytes);
  EXPECT_TRUE(take(10).empty());  // what was not asked for then is the gate's
}

// Hung before a wait that was foretold: its snapshot is the newest one of the state before.
TEST_F(DevicePlacementTest, WhatIsLeftIsOrderedWhenTheStepTakesTooLong) {
  learnSteps(8);
  EXPECT_TRUE(point(9));
  placement_->begin(policy_, kChunk, kBytes);
  placement_->pointDone(1, true, 0, 0);
  driver_.enqueued_ns += 5 * kMs;
  wait(OpEvent::kWaitBegin, 1);
  const auto first = take(9);
  ASSERT_EQ(first.size(), 1u);
  deviceComes();
  EXPECT_TRUE(take(9).empty());
  driver_.device_ns += 30 * kMs;  // and the host's clock with it
  const auto rest = take(9);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_FALSE(rest[0].behind_ns.has_value());
  EXPECT_EQ(first[0].bytes + rest[0].bytes, kBytes);
  EXPECT_TRUE(take(9).empty());
}

TEST_F(DevicePlacementTest, AStepWithMarksThatWereLostIsNotLearnt) {
  learnSteps(8);
  placement_->takeSteps();
  const uint64_t known = placement_->errors().steps;
  driver_.capturing = true;
  step(9, 1 * kMs);
  driver_.capturing = false;
  EXPECT_GT(marks_.lost(), 0u);
  deviceComes();
  for (int64_t number = 10; number <= 11; ++number) {
    step(number);
    deviceComes();
  }
  EXPECT_GT(placement_->errors().steps, known);
  EXPECT_EQ(step(12).size(), 2u);
  for (const DeviceStep& one : steps()) {
    EXPECT_EQ(one.whole, one.step != 8)
        << "step 8 and what was lost of step 9, to the program point of step 10";
  }
}

TEST_F(DevicePlacementTest, AFailedDeviceIsNotAskedAgain) {
  learnSteps(8);
  placement_->takeUntimed();
  driver_.broken = true;
  step(9);
  driver_.device_ns = driver_.enqueued_ns;
  placement_->learn();
  EXPECT_FALSE(copy_.usable());
  EXPECT_FALSE(point(10));
  EXPECT_FALSE(marks_.following());
  EXPECT_TRUE(take(10).empty());
  uint64_t untimed = 0;
  for (const uint64_t bytes : placement_->takeUntimed()) {
    untimed += bytes;
  }
  EXPECT_EQ(untimed, 2 * kBytes) << "of step 9, and of step 8 whose end was not passed";
}

TEST_F(DevicePlacementTest, NoEventIsLostOverManySteps) {
  uint64_t copied = 0;
  for (int64_t number = 1; number <= 3000; ++number) {
    step(number);
    if (number % 7 == 0) {
      for (const DeviceStep& one : steps()) {
        for (const DeviceCopies& part : one.copies) {
          copied += part.bytes;
        }
      }
    }
  }
  EXPECT_EQ(marks_.lost(), 0u);
  EXPECT_EQ(copied, 2995 * kBytes) << "of all but the newest ones";
}

TEST_F(DevicePlacementTest, NothingIsMarkedAfterItsEnd) {
  learnSteps(3);
  placement_.reset();
  EXPECT_FALSE(marks_.following());
  const int recorded = driver_.recorded;
  wait(OpEvent::kWaitBegin, 1);
  EXPECT_EQ(driver_.recorded, recorded);
  // The events are all there again.
  uint32_t taken = 0;
  while (marks_.take().has_value()) {
    ++taken;
  }
  EXPECT_EQ(taken, DeviceMarks::kEvents - DeviceMarks::kReserved);
}

TEST_F(DevicePlacementTest, AStepIsRecordedAsItWasByTheHostsClock) {
  learnSteps(8);
  placement_->takeSteps();
  step(9);
  const int64_t began_ns = point_ns_ + kAheadNs;
  nextPoint(10);
  const auto found = steps();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].step, 8);
  const DeviceStep& one = found[1];
  EXPECT_EQ(one.step, 9);
  EXPECT_TRUE(one.whole);
  EXPECT_TRUE(one.beside_copy);
  EXPECT_EQ(one.block, 9u);
  EXPECT_EQ(one.begin_ns, began_ns);
  EXPECT_EQ(one.end_ns - one.begin_ns, 30 * kMs + kMs / 2);
  ASSERT_EQ(one.waits.size(), 2u);
  EXPECT_EQ(one.waits[0].begin_ns, began_ns + 5 * kMs);
  EXPECT_EQ(one.waits[0].end_ns, began_ns + 15 * kMs);
  EXPECT_EQ(one.waits[0].op, OpKind::kRecv);
  EXPECT_TRUE(one.waits[0].bubble);
  EXPECT_EQ(one.waits[1].begin_ns, began_ns + 20 * kMs);
  ASSERT_EQ(one.copies.size(), 2u);
  EXPECT_EQ(one.copies[0].begin_ns, one.waits[0].begin_ns);
  EXPECT_EQ(one.copies[0].bytes + one.copies[1].bytes, kBytes);
  EXPECT_EQ(one.gate_begin_ns, began_ns + 30 * kMs);
  EXPECT_EQ(one.gate_end_ns, one.gate_begin_ns);
}

TEST_F(DevicePlacementTest, WhatTheGateWaitsForIsInItsStep) {
  policy_ = PlacementPolicy::kEager;
  step(1, 10 * kMs, 200 * kChunk);  // 40 ms, of which the step has 30
  nextPoint(2);
  const auto found = steps();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].gate_end_ns - found[0].gate_begin_ns, 10 * kMs);
  EXPECT_EQ(found[0].end_ns - found[0].begin_ns, 40 * kMs + kMs / 2);
}

TEST_F(DevicePlacementTest, NothingIsOrderedBeforeTheGateIfThatIsSaid) {
  learnSteps(8);
  placement_->takeSteps();
  EXPECT_TRUE(point(9));
  placement_->begin(std::nullopt, kChunk, kBytes);
  placement_->pointDone(3, /*beside_copy=*/false, 70, 80);
  work();
  EXPECT_TRUE(take(9).empty());
  copy({.bytes = kBytes, .tier = Tier::kGate, .step = 9}, driver_.enqueued_ns);
  gate();
  nextPoint(10);
  const DeviceStep one = steps().back();
  EXPECT_EQ(one.step, 9);
  EXPECT_FALSE(one.beside_copy);
  EXPECT_EQ(one.point_end_ns - one.point_begin_ns, 10);
  EXPECT_EQ(one.gate_begin_ns - one.begin_ns, 30 * kMs);
  EXPECT_EQ(one.gate_end_ns - one.gate_begin_ns, 8 * kMs);
  ASSERT_EQ(one.copies.size(), 1u);
  EXPECT_EQ(one.copies[0].tier, Tier::kGate);
  EXPECT_EQ(one.copies[0].bytes, kBytes);
}

TEST_F(DevicePlacementTest, NothingIsToldOfAStepWhoseProgramPointIsStillGoingOn) {
  EXPECT_TRUE(point(1));
  placement_->begin(policy_, kChunk, kBytes);
  deviceComes();
  EXPECT_TRUE(point(2));  // also says that nothing more is to come of the one before
  deviceComes();
  EXPECT_TRUE(placement_->takeSteps().empty())
      << "step 2 has not been told, so step 1 has not ended";
  placement_->pointDone(1, true, 0, 0);
  EXPECT_EQ(steps().size(), 1u);
}

TEST_F(DevicePlacementTest, AStepWithoutASnapshotIsMeasuredAndItsWaitsAreNot) {
  learnSteps(3);
  placement_->takeSteps();
  EXPECT_TRUE(point(4));
  placement_->pointDone(7, /*beside_copy=*/false, 0, 0);
  work();
  gate();
  nextPoint(5);
  const auto found = steps();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[1].step, 4);
  EXPECT_TRUE(found[1].whole);
  EXPECT_TRUE(found[1].waits.empty());
  EXPECT_EQ(found[1].end_ns - found[1].begin_ns, 30 * kMs + kMs / 2);
}

TEST_F(DevicePlacementTest, AStepWhoseGateIsNotKnownIsNotWhole) {
  EXPECT_TRUE(point(1));
  placement_->pointDone(1, true, 0, 0);
  work();
  nextPoint(2);
  const auto found = steps();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].whole);
}

TEST_F(DevicePlacementTest, AGateOfWhichOnlyTheEndIsMarkedIsNone) {
  EXPECT_TRUE(point(1));
  placement_->pointDone(1, true, 0, 0);
  work();
  driver_.capturing = true;
  placement_->gateBegin(kStream);
  driver_.capturing = false;
  placement_->gateEnd(kStream);
  nextPoint(2);
  const auto found = steps();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].whole);
  EXPECT_EQ(found[0].gate_begin_ns, found[0].gate_end_ns);
}

TEST_F(DevicePlacementTest, WaitsInsideOfWaitsAreNoneOfTheirOwn) {
  const auto nested = [&](int64_t number) {
    EXPECT_TRUE(point(number));
    placement_->begin(policy_, kChunk, kBytes);
    placement_->pointDone(1, true, 0, 0);
    driver_.enqueued_ns += 5 * kMs;
    wait(OpEvent::kWaitBegin, 1);
    driver_.enqueued_ns += 2 * kMs;
    wait(OpEvent::kWaitBegin, 3);
    driver_.enqueued_ns += 2 * kMs;
    wait(OpEvent::kWaitEnd, 3);
    driver_.enqueued_ns += 6 * kMs;
    wait(OpEvent::kWaitEnd, 1);
    driver_.enqueued_ns += 5 * kMs;
    wait(OpEvent::kWaitBegin, 2);
    driver_.enqueued_ns += 6 * kMs;
    wait(OpEvent::kWaitEnd, 2);
    driver_.enqueued_ns += 4 * kMs;
    const auto given = take(number);
    gate();
    deviceComes();
    return given;
  };
  for (int64_t number = 1; number <= 8; ++number) {
    nested(number);
  }
  const auto given = nested(9);
  ASSERT_EQ(given.size(), 2u);
  EXPECT_EQ(given[0].behind_ns, 5 * kMs);
  EXPECT_EQ(given[1].behind_ns, 20 * kMs) << "not the one inside";
  const DeviceStep one = steps().back();
  ASSERT_EQ(one.waits.size(), 2u);
  EXPECT_EQ(one.waits[0].end_ns - one.waits[0].begin_ns, 10 * kMs);
}

TEST_F(DevicePlacementTest, AMarkThatCannotBeRecordedCostsNoEvent) {
  EXPECT_TRUE(point(1));
  placement_->begin(policy_, kChunk, kBytes);
  driver_.unrecordable = true;
  for (uint32_t i = 0; i < 2 * DeviceMarks::kEvents; ++i) {
    wait(OpEvent::kWaitBegin, 1);
  }
  driver_.unrecordable = false;
  EXPECT_TRUE(placement_->takeMark().has_value());
}

// Their waits are not marked: a step without any is nothing to foretell the next one by.
TEST_F(DevicePlacementTest, StepsWithoutASnapshotAreNotLearnt) {
  for (const int64_t every : {2, 3, 4}) {
    SCOPED_TRACE(every);
    size_t behind_waits = 0;
    for (int64_t number = 1; number <= 40 * every; ++number) {
      if (number % every == 0) {
        const auto given = step(number);
        behind_waits += number > 20 * every && given.size() == 2 ? 1 : 0;
      } else {
        EXPECT_TRUE(point(number));
        placement_->pointDone(1, false, 0, 0);
        work();
        gate();
      }
      deviceComes();
    }
    EXPECT_EQ(behind_waits, 20u);
    placement_.emplace(copy_, marks_, host_);
  }
}

TEST_F(DevicePlacementTest, StepsBetweenWhichOthersWereNotMarkedAreNotWhole) {
  step(1);
  nextPoint(5);
  const auto found = steps();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].whole);
}

}  // namespace device_placement_test
}  // namespace reft
