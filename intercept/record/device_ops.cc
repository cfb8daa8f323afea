#include "intercept/record/device_ops.h"

#include "intercept/base/log.h"
#include "intercept/driver/device_error.h"

namespace reft {

namespace {

constexpr unsigned kNoMemoryBarrier = 1;  // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
constexpr cuda::Result kInvalidContext = 201;

}  // namespace

bool DeviceOps::ready() noexcept {
  const State state = state_.load(std::memory_order_acquire);
  if (state != State::kUntried) {
    return state == State::kReady;
  }
  const MutexLock lock(registering_);
  if (state_.load(std::memory_order_relaxed) != State::kUntried) {
    return state_.load(std::memory_order_relaxed) == State::kReady;
  }
  try {
    api_ = api_ == nullptr ? &cudaApi() : api_;
  } catch (...) {  // no memory for its table
    return false;
  }
  constexpr size_t kBytes = sizeof(reached_) + sizeof(passed_);
  // To register would break a capture of another thread.
  int mode = cuda::kCaptureModeRelaxed;
  if (!api_->available() || api_->threadExchangeCaptureMode(&mode) != cuda::kSuccess) {
    state_.store(State::kRefused, std::memory_order_release);
    return false;
  }
  cuda::Result result = api_->memHostRegister(&reached_, kBytes, cuda::kHostRegisterPortable);
  if (result == cuda::kSuccess) {
    result = api_->memHostGetDevicePointer(&at_, &reached_, 0);
  }
  if (result == cuda::kSuccess &&
      (api_->ctxGetCurrent(&context_) != cuda::kSuccess ||
       api_->eventCreate(&never_recorded_, cuda::kEventDisableTiming) != cuda::kSuccess)) {
    never_recorded_ = nullptr;
  }
  api_->threadExchangeCaptureMode(&mode);
  if (result == kInvalidContext) {
    return false;  // another thread will have one
  }
  state_.store(result == cuda::kSuccess ? State::kReady : State::kRefused,
               std::memory_order_release);
  if (result != cuda::kSuccess) {
    logInfo("intercept", "the device does not say where ops stand on it: ", api_->describe(result));
  }
  return result == cuda::kSuccess;
}

bool DeviceOps::write(const Words& words, uint64_t ticket, cuda::Stream stream) noexcept {
  if (!ready()) {
    return false;
  }
  int status = cuda::kCaptureNone;
  const cuda::Result asked = api_->streamIsCapturing(stream, &status);
  noteResult(asked);
  if (asked != cuda::kSuccess || status != cuda::kCaptureNone) {
    return false;
  }
  const uint64_t word = (&words == &passed_ ? kOps : 0) + ticket % kOps;
  const cuda::Result result = api_->streamWriteValue32(
      stream, at_ + word * sizeof(uint32_t), static_cast<uint32_t>(ticket), kNoMemoryBarrier);
  noteResult(result);
  if (result != cuda::kSuccess && result != kInvalidContext) {
    state_.store(State::kRefused, std::memory_order_release);
    logInfo("intercept",
            "the device no longer says where ops stand on it: ", api_->describe(result));
  }
  return result == cuda::kSuccess;
}

void DeviceOps::probe() const noexcept {
  // After a refusal, too: what refuses may be a device that has failed.
  if (state_.load(std::memory_order_acquire) == State::kUntried || never_recorded_ == nullptr) {
    return;
  }
  // Any of these calls may be the one that says it.
  int mode = cuda::kCaptureModeRelaxed;
  const cuda::Result relaxed = api_->threadExchangeCaptureMode(&mode);
  noteResult(relaxed);
  cuda::Context before = nullptr;
  api_->ctxGetCurrent(&before);
  cuda::Result result = api_->ctxSetCurrent(context_);
  if (result == cuda::kSuccess && relaxed == cuda::kSuccess) {
    result = api_->eventQuery(never_recorded_);
  }
  noteResult(result);
  api_->ctxSetCurrent(before);
  if (relaxed == cuda::kSuccess) {
    api_->threadExchangeCaptureMode(&mode);
  }
}

DeviceOps& processDeviceOps() {
  static auto* ops = new DeviceOps;
  return *ops;
}

}  // namespace reft
