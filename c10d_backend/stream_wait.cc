#include "c10d_backend/stream_wait.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace reft {

StreamWait::StreamWait(const OpLog* log, uint64_t ticket) noexcept {
  DeviceWaits& waits = processDeviceWaits();
  if (log == nullptr || !waits.watching() || !log->describe(ticket, mark_)) {
    return;
  }
  try {
    // By c10's interface for all kinds of devices, so nothing of CUDA is linked.
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const c10::Device device = guard.getDevice();
    stream_ = {device.index(), guard.getStreamNativeHandle(guard.getStream(device))};
  } catch (...) {
    return;
  }
  mark_.what = OpEvent::kWaitBegin;
  waits.mark(mark_, stream_);
}

StreamWait::~StreamWait() {
  if (stream_.device >= 0) {
    mark_.what = OpEvent::kWaitEnd;
    processDeviceWaits().mark(mark_, stream_);
  }
}

}  // namespace reft
