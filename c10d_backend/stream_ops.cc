#include "c10d_backend/stream_ops.h"

#include "c10d_backend/current_stream.h"
#include "intercept/record/device_ops.h"

namespace reft {

namespace {

using Mark = bool (DeviceOps::*)(uint64_t, cuda::Stream) noexcept;

void say(OpLog& log, uint64_t ticket, Mark mark, uint8_t flag) noexcept {
  DeviceOps& device = processDeviceOps();
  if (!device.used()) {
    return;
  }
  try {
    const DeviceStream on =
        currentStream(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice());
    if ((device.*mark)(ticket, on.stream)) {
      log.flag(ticket, flag);
    }
  } catch (...) {  // no CUDA after all
  }
}

}  // namespace

void sayWhenReached(OpLog& log, uint64_t ticket) noexcept {
  if (processDeviceOps().used()) {
    log.settle(processDeviceOps());
  }
  say(log, ticket, &DeviceOps::markReach, OpFlag::kReachAsked);
}

void sayWhenPassed(OpLog& log, uint64_t ticket) noexcept {
  say(log, ticket, &DeviceOps::markPass, OpFlag::kPassAsked);
}

}  // namespace reft
