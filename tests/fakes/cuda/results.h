// Result codes that CUDA's driver and runtime share (CUresult and cudaError_t have had the same
// numbers since CUDA 10.1).
#pragma once

namespace reft::fake {

using Result = int;

constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kMissingConfiguration = 52;
constexpr Result kInvalidDeviceFunction = 98;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidPtx = 218;
constexpr Result kInvalidHandle = 400;
constexpr Result kIllegalState = 401;
constexpr Result kNotFound = 500;
constexpr Result kNotReady = 600;
constexpr Result kIllegalAddress = 700;
constexpr Result kHostMemoryAlreadyRegistered = 712;
constexpr Result kHostMemoryNotRegistered = 713;
constexpr Result kMisalignedAddress = 716;
constexpr Result kLaunchFailure = 719;
constexpr Result kNotSupported = 801;
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureInvalidated = 901;
constexpr Result kCaptureUnjoined = 904;
constexpr Result kCaptureIsolation = 905;
constexpr Result kCapturedEvent = 907;

// "an illegal memory access was encountered", and its symbol for the driver and the runtime.
const char* textOf(Result result);
const char* runtimeNameOf(Result result);

}  // namespace reft::fake
