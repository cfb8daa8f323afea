// ReftBackend, as far as it is about the group and not about an op: options, family, end, hooks.
#include <utility>

#include "c10d_backend/backend.h"

namespace reft {

namespace {

// A device as one number, 0 for none.
int32_t packed(const std::optional<at::Device>& device) {
  return device ? (static_cast<int32_t>(device->type()) + 1) * 1024 + device->index() : 0;
}

}  // namespace

// See Note [lazy state].
void ReftBackend::syncLazyState() {
  const bool description_due =
      !description_synced_.load(std::memory_order_acquire) && !pg_desc_.empty();
  const int32_t device = packed(bound_device_id_);
  if (!description_due && device_synced_.load(std::memory_order_acquire) == device) {
    return;
  }
  const MutexLock lock(syncing_);
  if (description_due) {
    each([this](c10d::Backend& inner) { inner.setGroupDesc(pg_desc_); });
    description_synced_.store(true, std::memory_order_release);
  }
  if (device_synced_.load(std::memory_order_relaxed) != device) {
    if (parts_.cuda) {
      parts_.cuda->setBoundDeviceId(bound_device_id_);
    }
    device_synced_.store(device, std::memory_order_release);
  }
}

std::chrono::milliseconds ReftBackend::hostTimeout() {
  int64_t timeout = host_timeout_ms_.load(std::memory_order_relaxed);
  if (timeout == 0) {
    try {
      timeout = parts_.cpu->getBackendOptions()->timeout.count();
    } catch (...) {  // an inner backend without options
      timeout = kBackendDefaultTimeout.count();
    }
    host_timeout_ms_.store(timeout, std::memory_order_relaxed);
  }
  return std::chrono::milliseconds(timeout);
}

bool ReftBackend::supportsSplitting() const {
  return main().supportsSplitting();
}
bool ReftBackend::supportsTimeEstimation() const {
  return parts_.cuda && parts_.cuda->supportsTimeEstimation();
}
bool ReftBackend::supportsShrinking() const {
  return parts_.cuda && parts_.cuda->supportsShrinking();
}

// split_group() copies the options and passes them to split(): they must be of the inner type.
OptionsPtr ReftBackend::getBackendOptions() {
  return main().getBackendOptions();
}

void ReftBackend::setTimeout(std::chrono::milliseconds timeout) {
  host_timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
  each([&](c10d::Backend& inner) { inner.setTimeout(timeout); });
}

void ReftBackend::setSequenceNumberForGroup() {
#if !REFT_TORCH_AT_LEAST(2, 14)  // later ones only warn that it does nothing
  each([](c10d::Backend& inner) { inner.setSequenceNumberForGroup(); });
#endif
}

uint64_t ReftBackend::getSequenceNumberForGroup() {
  uint64_t sum = 0;
  each([&](c10d::Backend& inner) { sum += inner.getSequenceNumberForGroup(); });
  return sum;
}

void ReftBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto copy = hook;
  main().registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = std::move(copy);  // hasHooks() is not virtual
}

void ReftBackend::waitForPendingWorks() {
  main().waitForPendingWorks();
}
void ReftBackend::enableCollectivesTiming() {
  main().enableCollectivesTiming();
}

void ReftBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  each([&](c10d::Backend& inner) { inner.setGroupUid(uid); });
}

void ReftBackend::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  syncLazyState();
}

void ReftBackend::eagerConnectSingleDevice(at::Device device) {
  syncLazyState();
  if (parts_.cuda && !device.is_cpu()) {
    parts_.cuda->eagerConnectSingleDevice(device);
  } else if (parts_.cpu) {
    parts_.cpu->eagerConnectSingleDevice(device);
  }
}

c10d::ErrorType ReftBackend::getError() {
  return main().getError();
}
std::shared_ptr<c10::Allocator> ReftBackend::getMemAllocator() {
  return main().getMemAllocator();
}
at::Tensor ReftBackend::allocateTensor(long size, at::TensorOptions options) {
  return main().allocateTensor(size, options);
}
bool ReftBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return main().supportsTensorAlloc(device);
}

std::chrono::milliseconds ReftBackend::childTimeout(const OptionsPtr& opts) {
  return opts ? opts->timeout : parts_.cpu ? hostTimeout() : kBackendDefaultTimeout;
}

BackendPtr ReftBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                              const OptionsPtr& opts) {
  syncLazyState();
  return family_.split(store, ranks, opts, childTimeout(opts));
}

BackendPtr ReftBackend::merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                              const int& size) {
  return family_.merge(store, opts, rank, size, childTimeout(opts));
}

BackendPtr ReftBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                               const OptionsPtr& opts_override) {
  syncLazyState();
  return family_.shrink(ranks_to_exclude, shrink_flags, opts_override, childTimeout(nullptr));
}

void ReftBackend::abort() {
  closed_.store(true);
  std::exception_ptr failure;
  each([&](c10d::Backend& inner) {
    try {
      inner.abort();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void ReftBackend::shutdown() {
  if (closed_.exchange(true)) {
    return;
  }
  std::exception_ptr failure;
  each([&](c10d::Backend& inner) {
    try {
      inner.shutdown();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

// -- newer torch

void ReftBackend::suspend() {
  REFT_FORWARD(&main(), suspend);
}
void ReftBackend::resume() {
  REFT_FORWARD(&main(), resume);
}
std::unordered_map<std::string, uint64_t> ReftBackend::getMemoryStats() {
  return REFT_FORWARD(&main(), getMemoryStats);
}
bool ReftBackend::isInitialized() {
  return REFT_FORWARD(&main(), isInitialized);
}
void ReftBackend::startTimeEstimate() {
  REFT_FORWARD(&main(), startTimeEstimate);
}
float ReftBackend::endTimeEstimate() {
  return REFT_FORWARD(&main(), endTimeEstimate);
}

void ReftBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  each([&](c10d::Backend& inner) { REFT_FORWARD(&inner, addEphemeralTimeout, timeout); });
}

bool ReftBackend::supportsAbortHooks() const {
  bool all = true;
  each([&](c10d::Backend& inner) { all = all && REFT_FORWARD(&inner, supportsAbortHooks); });
  return all;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
// Rank and size would change under the wrapper and its other inner backend.
bool ReftBackend::supportsReconfigure() const {
  return false;
}
c10d::ReconfigureHandle ReftBackend::get_reconfigure_handle() const {
  return main().get_reconfigure_handle();
}
WorkPtr ReftBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  return main().reconfigure(opts);
}
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
bool ReftBackend::supportsWindow() const {
  return main().supportsWindow();
}
c10::intrusive_ptr<c10d::Window> ReftBackend::new_window(const std::optional<at::Tensor>& tensor) {
  return main().new_window(tensor);
}
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
void ReftBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  each([&](c10d::Backend& inner) { inner.registerAbortHook(id, hook); });
}
void ReftBackend::unregisterAbortHook(int64_t id) {
  each([&](c10d::Backend& inner) { inner.unregisterAbortHook(id); });
}
#endif

#if REFT_TORCH_HAS_COMPLETION_HOOKS
bool ReftBackend::supportsCompletionHooks() const {
  bool all = true;
  each([&](c10d::Backend& inner) { all = all && inner.supportsCompletionHooks(); });
  return all;
}
void ReftBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  each([&](c10d::Backend& inner) { inner.registerCompletionHook(id, hook); });
}
void ReftBackend::unregisterCompletionHook(int64_t id) {
  each([&](c10d::Backend& inner) { inner.unregisterCompletionHook(id); });
}
#endif

}  // namespace reft
