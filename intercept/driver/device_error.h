// The first error of this process's devices that lasts: after it, every call to the device fails
// and nothing that was enqueued is done (CUDA calls it sticky). A script that catches the error
// and goes on keeps the other ranks waiting.
//
// Noted from the answers of calls that are made anyway: no call is made to find out.
//
// Threads: any. Errors: none.
#pragma once

#include <cstdint>
#include <string>

#include "intercept/driver/cuda_api.h"

namespace reft {

struct DeviceError {
  int code = 0;       // as CUresult; 0: none
  int64_t at_ns = 0;  // CLOCK_MONOTONIC: when a call answered so first
};

// "an illegal memory access (CUDA error 700)"
std::string describeDeviceError(int code);

void noteResult(cuda::Result result) noexcept;
DeviceError deviceError() noexcept;

}  // namespace reft
