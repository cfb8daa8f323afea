// The current stream of the calling thread. Uses c10's interface for all kinds of devices, so that
// no CUDA library is linked.
//
// Threads: any. Errors: c10's, on a machine without CUDA.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include "intercept/record/device_marks.h"

namespace reft {

inline DeviceStream currentStream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  // Ids of torch's own streams, which it never destroys, are 0 or odd (c10/cuda/CUDAStream.cpp);
  // other ids are handles of foreign streams.
  return {device.index(), guard.getStreamNativeHandle(stream),
          stream.id() == 0 || (stream.id() & 1) != 0};
}

}  // namespace reft
