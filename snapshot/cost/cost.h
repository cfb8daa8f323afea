// What snapshots cost training, and what follows from it: measures each step (overhead_meter.h)
// against control steps (control_steps.h), and decides with the other ranks how often snapshots are
// taken (cadence.h).
//
// On the host a step lasts from one program point to the next, as the host sees them. Once a
// snapshot had regions on devices the host runs ahead, and the steps of the device count instead;
// with regions on several devices nothing is measured.
//
// Threads: one at a time (the engine's mutex). No clock inside. Errors: none.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "snapshot/cost/cadence.h"
#include "snapshot/cost/control_steps.h"
#include "snapshot/cost/overhead_meter.h"
#include "snapshot/device/device_step.h"

namespace reft {

class Cost {
 public:
  struct Figures {
    uint64_t every = 1;  // steps from one snapshot to the next
    bool known = false;  // whether the two below are measured
    int64_t overhead_ppm = 0;
    int64_t noise_ppm = 0;
  };
  // The step that begins at a program point.
  struct Step {
    uint64_t block = 0;  // of control_steps.h
    bool beside_copy = false;
    int64_t point_begin_ns = 0, point_end_ns = 0;
  };

  Cost(const CadenceOptions& cadence, uint32_t control_every);

  // -- at each program point, in this order --

  // Ends the measured step. `device_steps`: those that the device has ended since the point before.
  // Returns the nanoseconds since that point, 0 at the first one.
  int64_t beginPoint(int64_t step, int64_t now_ns, std::span<const DeviceStep> device_steps);
  // Whether decide() needs the outcomes of all snapshots so far.
  bool decidesAt(int64_t step) const { return cadence_.decidesAt(step); }
  // Whether `step` has a snapshot.
  Cadence::Answer decide(int64_t step, bool outcomes_known);
  // Whether the snapshot of this point shall leave its step alone.
  bool wantsControl() const { return control_; }
  // A snapshot begins. `control`: no copy runs beside its step.
  void beginSnapshot(bool control) { now_.beside_copy = !control; }
  // The next step begins.
  Step endPoint(int64_t now_ns);

  // The snapshot of `step` is the first one with regions on devices.
  void moveToDevices(int64_t step);
  bool onDevices() const { return on_devices_; }
  // Snapshots cost something else from now on; the figures stay until there are new ones.
  void restart();
  // Whether they cost more than the limit at the longest interval, as measured since then.
  bool exceedsAtLongest() const { return cadence_.exceedsAtLongest(); }
  // From now on graphs may write state on devices without a gate: nothing is measured there.
  void expectReplays();
  bool replays() const { return replays_; }

  // The job committed `step` with this proposal.
  void committed(int64_t step, uint8_t proposal) { cadence_.committed(step, proposal); }
  // What this rank's vote carries.
  uint8_t proposal() const { return cadence_.proposal(); }
  uint64_t every() const { return cadence_.every(); }
  // When the program point began at which the thread that trains is; nullopt: it is at none.
  std::optional<int64_t> pointBegan() const;
  Figures figures() const;

 private:
  void measureDevice(std::span<const DeviceStep> steps);

  Cadence cadence_;
  ControlSteps control_steps_;
  OverheadMeter meter_;
  AfterGate after_gate_;         // of the device's usual steps
  Step now_;                     // point_begin_ns 0: no program point yet
  uint64_t measured_every_;      // cadence that the meter measures
  uint64_t blocks_learned_ = 0;  // of the meter, that the cadence knows
  bool at_point_ = false;
  bool control_ = false;
  bool on_devices_ = false;
  bool replays_ = false;
};

}  // namespace reft
