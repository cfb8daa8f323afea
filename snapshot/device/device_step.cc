#include "snapshot/device/device_step.h"

#include <algorithm>

namespace reft {

namespace {

// Cuts `copy` at the instants at which waits and the gate begin and end; bytes in proportion to
// time.
void cut(const DeviceCopies& copy, const DeviceStep& step, std::vector<DeviceCopies>& parts) {
  int64_t at_ns = copy.begin_ns;
  uint64_t given = 0;
  const auto until = [&](int64_t end_ns, Tier tier) {
    end_ns = std::clamp(end_ns, at_ns, copy.end_ns);
    if (end_ns == at_ns) {
      return;
    }
    const double share = static_cast<double>(end_ns - copy.begin_ns) /
                         static_cast<double>(copy.end_ns - copy.begin_ns);
    const uint64_t so_far = end_ns == copy.end_ns
                                ? copy.bytes
                                : static_cast<uint64_t>(share * static_cast<double>(copy.bytes));
    parts.push_back({at_ns, end_ns, so_far - given, tier});
    given = so_far;
    at_ns = end_ns;
  };
  auto wait = std::lower_bound(
      step.waits.begin(), step.waits.end(), copy.begin_ns,
      [](const DeviceWait& one, int64_t begin_ns) { return one.end_ns <= begin_ns; });
  for (; wait != step.waits.end() && wait->begin_ns < copy.end_ns; ++wait) {
    until(wait->begin_ns, Tier::kCompute);
    until(wait->end_ns, wait->bubble ? Tier::kGap : Tier::kCommunication);
  }
  if (step.gate_end_ns > step.gate_begin_ns) {
    until(step.gate_begin_ns, Tier::kCompute);
    until(step.gate_end_ns, Tier::kGate);
  }
  until(copy.end_ns, Tier::kCompute);
}

}  // namespace

int64_t withoutSnapshotNs(const DeviceStep& step, int64_t after_gate_ns) {
  const int64_t host_ns = step.point_end_ns - step.point_begin_ns;
  const int64_t ahead_ns = step.begin_ns - step.point_begin_ns;
  int64_t at_point_ns = std::clamp<int64_t>(host_ns - ahead_ns, 0, std::max<int64_t>(0, host_ns));
  for (const DeviceCopies& copy : step.copies) {
    if (copy.tier == Tier::kAtOnce) {  // begun there, so also while the host was busy
      at_point_ns = std::max(at_point_ns, copy.end_ns - step.begin_ns);
    }
  }
  return step.gate_begin_ns - step.begin_ns - at_point_ns + after_gate_ns;
}

void AfterGate::add(const DeviceStep& step) {
  newest_ns_.push_back(step.end_ns - step.gate_end_ns);
  if (newest_ns_.size() > kNewest) {
    newest_ns_.pop_front();
  }
}

int64_t AfterGate::usualNs() const {
  if (newest_ns_.empty()) {
    return 0;
  }
  std::vector<int64_t> sorted(newest_ns_.begin(), newest_ns_.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::vector<DeviceCopies> partsOf(const DeviceStep& step) {
  std::vector<DeviceCopies> parts;
  for (const DeviceCopies& copy : step.copies) {
    if (copy.tier == Tier::kAtOnce || copy.tier == Tier::kGate || copy.end_ns <= copy.begin_ns) {
      parts.push_back(copy);
    } else {
      cut(copy, step, parts);
    }
  }
  return parts;
}

}  // namespace reft
