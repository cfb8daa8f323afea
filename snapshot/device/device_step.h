// One step of a device, by the device's own times: when it waited, when copies ran, and what ran
// beside them.
//
// Threads: plain values. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "intercept/record/op_log.h"
#include "snapshot/placement/placer.h"

namespace reft {

// The stream that trains stood still until an op was done.
struct DeviceWait {
  int64_t begin_ns = 0, end_ns = 0;
  OpKind op = OpKind::kUnknown;
  uint64_t bytes = 0;
  bool bubble = false;  // else for a large collective (schedule_model.h)
};

// Copies that were enqueued together.
struct DeviceCopies {
  int64_t begin_ns = 0, end_ns = 0;
  uint64_t bytes = 0;
  Tier tier = Tier::kCompute;  // of their order
};

// Times are CLOCK_MONOTONIC of the host.
struct DeviceStep {
  int64_t step = 0;  // at whose program point it begins
  int64_t begin_ns = 0;
  int64_t end_ns = 0;  // the next program point
  int64_t gate_begin_ns = 0, gate_end_ns = 0;
  int64_t point_begin_ns = 0,
          point_end_ns = 0;  // of the host, at the program point with which it begins
  uint64_t block = 0;        // of control_steps.h
  bool beside_copy = false;
  bool whole = false;  // its gate is known, and the next program point is that of the next step
  std::vector<DeviceWait> waits;     // in order, none inside another one
  std::vector<DeviceCopies> copies;  // in order
};

// Each copy in parts, by what the device did beside it: waits and the gate cut it. Copies for the
// program point or the gate stay whole, because training waited for them.
std::vector<DeviceCopies> partsOf(const DeviceStep& step);

// The length of a control step without its snapshot. Subtracts the wait at the gate (where the
// whole copy of a control step lies), copies that the device waited for at the program point, and
// the time that it idled there while the host worked for the snapshot. The time behind the gate is
// that of usual steps (`after_gate_ns`): while this step's device waits at the gate, the host gets
// ahead.
int64_t withoutSnapshotNs(const DeviceStep& step, int64_t after_gate_ns);

// How long steps of the usual kind take behind their gates: the median of the newest ones, as one
// of several optimizers may step only now and then, and have its gate at another place of the step.
class AfterGate {
 public:
  void add(const DeviceStep& step);
  int64_t usualNs() const;  // 0: no step yet

 private:
  static constexpr size_t kNewest = 5;
  std::deque<int64_t> newest_ns_;
};

}  // namespace reft
