#include "snapshot/cost/cost.h"

namespace reft {

namespace {

// Copying the snapshot of a control step idles a device, but no processor core, so control steps
// are rarer on devices.
constexpr uint32_t kRarerOnDevices = 8;
constexpr int64_t kWarmUpSteps = 3;  // not measured: they touch memory for the first time

}  // namespace

Cost::Cost(const CadenceOptions& cadence, uint32_t control_every)
    : cadence_(cadence), control_steps_(control_every), measured_every_(cadence_.every()) {}

int64_t Cost::beginPoint(int64_t step, int64_t now_ns, std::span<const DeviceStep> device_steps) {
  const bool first = now_.point_begin_ns == 0;
  const int64_t since_ns = first ? 0 : now_ns - now_.point_begin_ns;
  if (first) {
    control_steps_.beginAt(step + kWarmUpSteps);
  } else if (on_devices_) {
    measureDevice(device_steps);
  } else {
    // The time at the program point is a cost of the snapshot, except in a control step.
    meter_.step(now_.block, now_ns - (now_.beside_copy ? now_.point_begin_ns : now_.point_end_ns),
                now_.beside_copy);
  }
  now_.point_begin_ns = now_.point_end_ns = now_ns;
  now_.beside_copy = false;
  at_point_ = true;
  return since_ns;
}

void Cost::measureDevice(std::span<const DeviceStep> steps) {
  for (const DeviceStep& step : steps) {
    if (step.beside_copy) {
      after_gate_.add(step);
      meter_.step(step.block, step.end_ns - step.begin_ns, true);
    } else {
      meter_.step(step.block, withoutSnapshotNs(step, after_gate_.usualNs()), false);
    }
  }
}

Cadence::Answer Cost::decide(int64_t step, bool outcomes_known) {
  const Cadence::Answer answer = cadence_.ask(step, outcomes_known);
  if (cadence_.every() != measured_every_) {
    measured_every_ = cadence_.every();
    control_steps_.beginAt(cadence_.since());
    meter_.restart(control_steps_.block(step));
  }
  now_.block = control_steps_.block(step);
  control_ = answer == Cadence::Answer::kTake && measured_every_ == 1 && control_steps_.drawn(step);
  if (meter_.blocks() != blocks_learned_) {
    blocks_learned_ = meter_.blocks();
    cadence_.learn(meter_.overhead(), meter_.isCurrent());
  }
  return answer;
}

Cost::Step Cost::endPoint(int64_t now_ns) {
  now_.point_end_ns = now_ns;
  at_point_ = control_ = false;
  return now_;
}

void Cost::moveToDevices(int64_t step) {
  on_devices_ = true;
  control_steps_.lengthen(kRarerOnDevices);
  meter_.restart(control_steps_.block(step));  // the times so far were the host's
}

void Cost::restart() {
  cadence_.forgetExcess();
  meter_.restart(now_.block);
}

void Cost::expectReplays() {
  if (!replays_ && on_devices_) {
    meter_.forget();
  }
  replays_ = true;
}

std::optional<int64_t> Cost::pointBegan() const {
  return at_point_ ? std::optional(now_.point_begin_ns) : std::nullopt;
}

Cost::Figures Cost::figures() const {
  const Overhead& overhead = meter_.overhead();
  const auto every = static_cast<int64_t>(cadence_.every());
  return {.every = cadence_.every(),
          .known = overhead.known,
          .overhead_ppm = overhead.ppm / every,
          .noise_ppm = overhead.noise_ppm / every};
}

}  // namespace reft
