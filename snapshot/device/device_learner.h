// Learns from a device's own times, behind it: the schedule, the rate of copies and the guard (a
// Placer), and how each step was (device_step.h).
//
// Its input, in order, are steps that have begun, marks on the stream that trains, and batches of
// copies. Once the device has passed a mark, the learner takes its time, without waiting, and gives
// the mark back. It does not learn from a step with missing marks, nor from one without a snapshot,
// whose waits are not marked.
//
// Threads: one at a time. Errors: none are thrown besides std::bad_alloc. After a failed call of
// the driver it learns nothing any more.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "intercept/base/clock.h"
#include "intercept/record/device_marks.h"
#include "snapshot/device/device_clock.h"
#include "snapshot/device/device_copy.h"
#include "snapshot/device/device_step.h"
#include "snapshot/placement/placer.h"

namespace reft {

class DeviceLearner {
 public:
  // All have to outlive it.
  DeviceLearner(DeviceCopy& copy, DeviceMarks& marks, const Clock& host)
      : marks_(marks), clock_(copy, marks, host) {}
  ~DeviceLearner();
  DeviceLearner(const DeviceLearner&) = delete;
  DeviceLearner& operator=(const DeviceLearner&) = delete;

  // A step that has begun, as the host knows it.
  struct Begun {
    int64_t step = 0;
    int device = -1;
    uint64_t lost = 0;  // marks, before it
    uint64_t block = 0;
    bool beside_copy = false;
    int64_t point_begin_ns = 0, point_end_ns = 0;  // of the host
    uint64_t chunk_bytes = 0;
    uint64_t bytes = 0;  // to be placed; 0: it has no snapshot
  };
  // Copies between two marks of the copy stream.
  struct Batch {
    int64_t step = 0;
    Tier tier = Tier::kCompute;  // what they were ordered as
    size_t wait = 0;             // of the step, that they were ordered behind; kGap only
    uint64_t bytes = 0;
    uint32_t begin = 0, end = 0;
  };
  void add(const Begun& begun) { begun_.push_back(begun); }
  void add(const OpEvent& mark) { pending_.push_back(mark); }
  void add(const Batch& batch) { batches_.push_back(batch); }

  // Learns from what the device has passed since the last call. False: the driver has failed, and
  // all marks are given back.
  bool learn();

  // The step that the device is in: its number (-1: none), and when it began, by the host's clock.
  int64_t step() const { return now_ ? now_->step : -1; }
  int64_t stepBeganNs() const { return clock_.hostNs(record_.begin_ns); }
  // Where the bytes of a snapshot like the newest one would go in a step like the one that is
  // foretold.
  PlacementPlan foresee() const { return placer_.foresee(bytes_, /*past_the_guard=*/true); }
  uint64_t bytes() const { return bytes_; }
  const Placer& placer() const { return placer_; }

  // Steps that the device has ended since the last call, in order.
  std::vector<DeviceStep> takeSteps();
  // Bytes whose copy times are lost, by the tier of their order, since the last call.
  std::array<uint64_t, kTiers> takeUntimed();

 private:
  bool learnMark();
  bool learnPoint(const OpEvent& mark, int64_t at_ns);
  bool settle(int64_t step, size_t waits);
  void endStep(const Begun& next, int64_t at_ns);
  void drop(const Batch& batch);
  void giveBackAll();

  DeviceMarks& marks_;
  DeviceClock clock_;
  Placer placer_{PlacerOptions{}};
  std::deque<Begun> begun_;      // steps whose program points are not known to have been passed
  std::deque<OpEvent> pending_;  // marks that are not known to have been passed
  std::deque<Batch> batches_;    // not known to have landed
  std::optional<Begun> now_;
  uint64_t bytes_ = 0;  // of the newest snapshot
  DeviceStep record_;   // of it, in times of the device
  bool gate_begun_ = false, gate_ended_ = false;
  bool wait_ended_ = false;  // that of the oldest mark, and copies for it have not landed
  size_t depth_ = 0;         // waits that are open
  size_t waits_ = 0;         // that have ended, those inside of others not counted
  DeviceWait wait_;          // the newest one
  std::vector<DeviceStep> steps_;
  std::array<uint64_t, kTiers> untimed_{};
};

}  // namespace reft
