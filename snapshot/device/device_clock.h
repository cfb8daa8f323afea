// Times of a device's events on the host's clock, so that what the device did can stand beside what
// the host did.
//
// The driver gives only distances between two events. Times are therefore counted from one event,
// the base, which moves on with the steps. Each look at an event that was passed bounds how far the
// host's clock is ahead: the device came to the event before. The tightest bound of the newest
// steps counts, because the thread that waits for copies looks often. So times are late by at most
// the shortest polling delay (< 1 ms). Distances within a step are as exact as the driver's
// (milliseconds as a float).
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
  // Counts times from this mark on: keeps it, and gives the one before back.
  void rebase(uint32_t mark, int64_t at_ns);
  void giveBackBase();
  // The same instant by the host's clock. Needs an earlier timeOf() that returned a time.
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
