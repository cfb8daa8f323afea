#include "intercept/record/device_marks.h"

namespace reft {

DeviceMarks::~DeviceMarks() {
  for (cuda::Event event : events_) {
    if (event != nullptr) {
      api_->eventDestroy(event);
    }
  }
}

bool DeviceMarks::follow(const CudaApi& api, const DeviceStream& stream) noexcept {
  if (api_ == nullptr) {
    for (cuda::Event& event : events_) {
      if (api.eventCreate(&event, cuda::kEventTiming) != cuda::kSuccess) {
        event = nullptr;
        break;
      }
    }
    if (events_.front() == nullptr) {
      return false;
    }
    for (uint32_t i = 0; i < kEvents; ++i) {
      used_[i].store(events_[i] == nullptr, std::memory_order_relaxed);
      in_use_.fetch_add(events_[i] == nullptr ? 1 : 0, std::memory_order_relaxed);
    }
    api_ = &api;
    device_ = stream.device;
  }
  if (stream.device != device_) {
    forget();
    return false;
  }
  stream_.store(stream.stream, std::memory_order_relaxed);
  following_.store(true, std::memory_order_release);
  return true;
}

void DeviceMarks::forget() noexcept {
  ignore();
  following_.store(false, std::memory_order_release);
}

std::optional<uint32_t> DeviceMarks::take(bool reserved) noexcept {
  if (in_use_.fetch_add(1, std::memory_order_relaxed) <
      (reserved ? kEvents : kEvents - kReserved)) {
    // There is one; others may take and give back meanwhile.
    for (uint32_t i = 0; i < 2 * kEvents; ++i) {
      const uint32_t at = next_.fetch_add(1, std::memory_order_relaxed) % kEvents;
      if (!used_[at].exchange(true, std::memory_order_acquire)) {
        return at;
      }
    }
  }
  in_use_.fetch_sub(1, std::memory_order_relaxed);
  return std::nullopt;
}

void DeviceMarks::giveBack(uint32_t mark) noexcept {
  used_[mark].store(false, std::memory_order_release);
  in_use_.fetch_sub(1, std::memory_order_relaxed);
}

bool DeviceMarks::mark(OpEvent mark, const DeviceStream& stream) noexcept {
  if (!following() || stream.device != device_ ||
      stream.stream != stream_.load(std::memory_order_relaxed)) {
    return false;
  }
  int status = cuda::kCaptureNone;
  if (api_->streamIsCapturing(stream.stream, &status) != cuda::kSuccess ||
      status != cuda::kCaptureNone) {
    lost_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  const bool wait = mark.what == OpEvent::kWaitBegin || mark.what == OpEvent::kWaitEnd;
  const auto at = take(/*reserved=*/!wait);
  if (!at || api_->eventRecord(events_[*at], stream.stream) != cuda::kSuccess) {
    if (at) {
      giveBack(*at);
    }
    lost_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  mark.mark = *at;
  marks_.push(mark);
  if (listener_ != nullptr) {
    listener_->nudge(mark.what);
  }
  return true;
}

DeviceMarks& processDeviceMarks() {
  static auto* const marks = new DeviceMarks(&processOpEvents());
  return *marks;
}

}  // namespace reft
