#include "intercept/driver/device_error.h"

#include <atomic>

#include "intercept/base/clock.h"
#include "intercept/driver/lasting_errors.h"

namespace reft {

namespace {

std::atomic<int> first_code{0};
std::atomic<int64_t> first_at_ns{0};

}  // namespace

std::string describeDeviceError(int code) {
  const cuda::LastingError* const known = cuda::lastingError(code);
  return std::string(known == nullptr ? "an error" : known->meaning) + " (CUDA error " +
         std::to_string(code) + ")";
}

void noteResult(cuda::Result result) noexcept {
  if (result == cuda::kSuccess || cuda::lastingError(result) == nullptr) {
    return;
  }
  int64_t none = 0;  // the time first: a code has one
  first_at_ns.compare_exchange_strong(none, SteadyClock::instance().nowNs());
  int zero = 0;
  first_code.compare_exchange_strong(zero, result);
}

DeviceError deviceError() noexcept {
  return {first_code.load(), first_at_ns.load()};
}

}  // namespace reft
