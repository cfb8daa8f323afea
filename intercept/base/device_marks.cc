#include "intercept/base/device_marks.h"

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

std::optional<uint32_t> DeviceMarks::take() noexcept {
  constexpr uint32_t kLooks = 64;  // a pool that is nearly empty is as good as empty
  for (uint32_t i = 0; i < kLooks; ++i) {
    const uint32_t at = next_.fetch_add(1, std::memory_order_relaxed) % kEvents;
    if (!used_[at].exchange(true, std::memory_order_acquire)) {
      return at;
    }
  }
  return std::nullopt;
}

void DeviceMarks::mark(OpEvent mark, const DeviceStream& stream) noexcept {
  if (!following() || stream.device != device_ || stream.stream != stream_.load(std::memory_order_relaxed)) {
    return;
  }
  int status = cuda::kCaptureNone;
  if (api_->streamIsCapturing(stream.stream, &status) != cuda::kSuccess || status != cuda::kCaptureNone) {
    lost_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const auto at = take();
  if (!at || api_->eventRecord(events_[*at], stream.stream) != cuda::kSuccess) {
    lost_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  mark.mark = *at;
  marks_.push(mark);
}

DeviceMarks& processDeviceMarks() {
  static auto* const waits = new DeviceMarks;
  return *waits;
}

}  // namespace reft
