#include "tests/fakes/cuda/results.h"

#include <algorithm>
#include <array>

namespace reft::fake {

namespace {

struct Known {
  Result result;
  const char* name;
  const char* text;
};

constexpr std::array kKnown = {
    Known{kSuccess, "cudaSuccess", "no error"},
    Known{kInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    Known{kOutOfMemory, "cudaErrorMemoryAllocation", "out of memory"},
    Known{kMissingConfiguration, "cudaErrorMissingConfiguration",
          "__global__ function call is not configured"},
    Known{kInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    Known{kInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    Known{kInvalidContext, "cudaErrorDeviceUninitialized", "invalid device context"},
    Known{kInvalidPtx, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
    Known{kInvalidHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    Known{kIllegalState, "cudaErrorIllegalState",
          "the operation cannot be performed in the present state"},
    Known{kNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    Known{kNotReady, "cudaErrorNotReady", "device not ready"},
    Known{kIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    Known{kHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
          "part or all of the requested memory range is already mapped"},
    Known{kHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
          "pointer does not correspond to a registered memory region"},
    Known{kMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    Known{kLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    Known{kNotSupported, "cudaErrorNotSupported", "operation not supported"},
    Known{kCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
          "operation not permitted when stream is capturing"},
    Known{kCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
          "operation failed due to a previous error during capture"},
    Known{kCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    Known{kCaptureIsolation, "cudaErrorStreamCaptureIsolation",
          "dependency created on uncaptured work in another stream"},
    Known{kCapturedEvent, "cudaErrorCapturedEvent",
          "operation not permitted on an event last recorded in a capturing stream"},
};

const Known* find(Result result) {
  const auto* found = std::find_if(kKnown.begin(), kKnown.end(),
                                   [&](const Known& k) { return k.result == result; });
  return found == kKnown.end() ? nullptr : found;
}

}  // namespace

const char* textOf(Result result) {
  const Known* known = find(result);
  return known == nullptr ? "unrecognized error code" : known->text;
}

const char* runtimeNameOf(Result result) {
  const Known* known = find(result);
  return known == nullptr ? "unrecognized error code" : known->name;
}

}  // namespace reft::fake
