// Times of a device's events on the host's clock, so that what the device did can stand beside what
// the host did.
//
// Events keep times of the device's own clock, and only distances between two of them can be asked
// for. Times are therefore first counted from one event, the base, which moves on with the steps.
// How far the host's clock is ahead is bounded by each look at an event that was passed: the device
// came to it before. The tightest bound of the newest steps is taken, because whoever waits for
// copies to land looks often. So times are told too late by as much as the host was late to look
// when it was quickest (less than a millisecond). Distances between times of a step are as exact as
// the driver tells them, in milliseconds as a float.
//
// Threads: one at a time. Errors: none; a driver that fails ends it (failed()).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "intercept/base/clock.h"
#include "intercept/record/device_marks.h"
#include "snapshot/device/device_copy.h"

namespace reft {

class DeviceClock {
 public:
  // All have to outlive it.
  DeviceClock(DeviceCopy& copy, DeviceMarks& marks, const Clock& host)
      : copy_(copy), marks_(marks), host_(host) {
    ahead_.fill(kUnknown);
  }

  void use(int device) { device_ = device; }
  bool failed() const { return failed_; }

  // When the device came to a mark, in its nanoseconds since the first base. nullopt: it has not,
  // or the driver fails.
  std::optional<int64_t> timeOf(uint32_t mark);
  // Times are counted from this mark on; it is kept, and the one before is given back.
  void rebase(uint32_t mark, int64_t at_ns);
  void giveBackBase();
  // The same instant by the host's clock. To be asked after timeOf() has told of some.
  int64_t hostNs(int64_t at_ns) const;

 private:
  static constexpr size_t kSteps = 16;  // whose looks count; clocks drift
  static constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();

  DeviceCopy& copy_;
  DeviceMarks& marks_;
  const Clock& host_;
  int device_ = -1;
  bool failed_ = false;
  std::optional<uint32_t> base_;
  int64_t base_ns_ = 0;
  std::array<int64_t, kSteps> ahead_{};  // at most, by the looks of a step
  size_t step_ = 0;
};

}  // namespace reft
