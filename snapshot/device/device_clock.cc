#include "snapshot/device/device_clock.h"

#include <algorithm>

namespace reft {

std::optional<int64_t> DeviceClock::timeOf(uint32_t mark) {
  if (device_ < 0) {
    return std::nullopt;
  }
  const std::optional<bool> passed = copy_.passed(device_, marks_.event(mark));
  int64_t since_base_ns = 0;
  failed_ = failed_ || !passed ||
            (*passed && base_ &&
             !copy_.elapsed(device_, marks_.event(*base_), marks_.event(mark), since_base_ns));
  if (failed_ || !*passed) {
    return std::nullopt;
  }
  const int64_t at_ns = base_ns_ + since_base_ns;
  int64_t& ahead = ahead_[step_ % kSteps];
  ahead = std::min(ahead, host_.nowNs() - at_ns);
  return at_ns;
}

void DeviceClock::rebase(uint32_t mark, int64_t at_ns) {
  giveBackBase();
  base_ = mark;
  base_ns_ = at_ns;
  ahead_[++step_ % kSteps] = kUnknown;
}

void DeviceClock::giveBackBase() {
  if (base_) {
    marks_.giveBack(*base_);
    base_.reset();
  }
}

int64_t DeviceClock::hostNs(int64_t at_ns) const {
  const int64_t ahead = *std::min_element(ahead_.begin(), ahead_.end());
  return ahead == kUnknown ? at_ns : at_ns + ahead;
}

}  // namespace reft
