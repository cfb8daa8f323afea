#include "c10d_backend/stream_wait.h"

#include "c10d_backend/current_stream.h"

namespace reft {

StreamWait::StreamWait(const OpLog* log, uint64_t ticket) noexcept {
  DeviceMarks& marks = processDeviceMarks();
  if (log == nullptr || !marks.watching() || !log->describe(ticket, mark_)) {
    return;
  }
  try {
    stream_ = currentStream(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice());
  } catch (...) {
    return;
  }
  mark_.what = OpEvent::kWaitBegin;
  marked_ = marks.markWait(mark_, stream_);
}

StreamWait::~StreamWait() {
  if (marked_) {
    mark_.what = OpEvent::kWaitEnd;
    processDeviceMarks().mark(mark_, stream_);
  }
}

}  // namespace reft
