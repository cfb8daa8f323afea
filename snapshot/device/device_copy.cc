#include "snapshot/device/device_copy.h"

#include <sys/mman.h>

#include <chrono>
#include <thread>

#include "intercept/driver/device_error.h"
#include "snapshot/vault/vault_format.h"

namespace reft {

namespace {

constexpr auto kLastWait = std::chrono::milliseconds(500);

}  // namespace

// Within its life the calling thread uses the device's context, and no call that may wait breaks a
// capture of another thread.
class DeviceCopy::Context {
 public:
  Context(const CudaApi& api, cuda::Context context) : api_(api) {
    api_.ctxGetCurrent(&before_);
    if (before_ != context) {
      api_.ctxSetCurrent(context);
      changed_ = true;
    }
    api_.threadExchangeCaptureMode(&mode_);
  }
  ~Context() {
    api_.threadExchangeCaptureMode(&mode_);
    if (changed_) {
      api_.ctxSetCurrent(before_);
    }
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  const CudaApi& api_;
  cuda::Context before_ = nullptr;
  bool changed_ = false;
  int mode_ = cuda::kCaptureModeRelaxed;  // after the exchange: the thread's own
};

DeviceCopy::DeviceCopy(const CudaApi& api) : api_(api) {
  if (!api_.available()) {
    why_ = api_.why;
    usable_.store(false);
  }
}

// Copies may still be under way, so the memory that they write stays pinned until their streams are
// through. A device that hangs is not waited for: what it has is left to the end of the process.
DeviceCopy::~DeviceCopy() {
  for (const auto& one : devices_) {
    if (one != nullptr) {
      const Context context(api_, one->context);
      const auto end = std::chrono::steady_clock::now() + kLastWait;
      cuda::Result state = cuda::kNotReady;
      while ((state = api_.streamQuery(one->stream)) == cuda::kNotReady &&
             std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (state == cuda::kNotReady) {
        return;
      }
    }
  }
  while (!pinned_.empty()) {
    unpin(pinned_.begin()->first);
  }
  for (int index = 0; index < kMaxDevices; ++index) {
    const auto& one = devices_[static_cast<size_t>(index)];
    if (one != nullptr) {
      {
        const Context context(api_, one->context);
        DeviceXor::giveBack(std::move(one->sum));
        api_.eventDestroy(one->event);
        api_.streamDestroy(one->stream);
      }
      api_.devicePrimaryCtxRelease(index);
    }
  }
  for (const auto& [address, bytes] : own_) {
    ::munmap(address, bytes);
  }
}

std::string DeviceCopy::why() const {
  const MutexLock lock(mutex_);
  return why_;
}

bool DeviceCopy::ok(cuda::Result result, const char* call) {
  if (result == cuda::kSuccess) {
    return true;
  }
  noteResult(result);
  const MutexLock lock(mutex_);
  if (usable_.exchange(false)) {
    why_ = std::string(call) + ": " + api_.describe(result);
  }
  return false;
}

std::byte* DeviceCopy::memory(size_t bytes) {
  // Shared: after a fork, a write of ours to a private page would move it away from under the
  // device.
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    ok(cuda::kOutOfMemory, "mmap");
    return nullptr;
  }
  if (!pin(mapped, bytes)) {
    ::munmap(mapped, bytes);
    return nullptr;
  }
  own_.emplace_back(mapped, bytes);
  return static_cast<std::byte*>(mapped);
}

DeviceCopy::Device* DeviceCopy::device(int index) {
  if (index < 0) {
    return nullptr;
  }
  if (index >= kMaxDevices) {
    ok(101, "device");
    return nullptr;
  }
  auto& found = devices_[static_cast<size_t>(index)];
  if (found != nullptr) {
    return found.get();
  }
  auto made = std::make_unique<Device>();
  if (!ok(api_.devicePrimaryCtxRetain(&made->context, index), "cuDevicePrimaryCtxRetain")) {
    return nullptr;
  }
  const Context context(api_, made->context);
  int lowest = 0;
  int highest = 0;
  if (!ok(api_.ctxGetStreamPriorityRange(&lowest, &highest), "cuCtxGetStreamPriorityRange") ||
      !ok(api_.streamCreate(&made->stream, cuda::kStreamNonBlocking, lowest),
          "cuStreamCreateWithPriority") ||
      !ok(api_.eventCreate(&made->event, cuda::kEventDisableTiming), "cuEventCreate")) {
    return nullptr;
  }
  if (marks_ == nullptr) {
    marks_ = reinterpret_cast<std::atomic<uint32_t>*>(memory(kPage));
  }
  if (marks_ == nullptr || !ok(api_.memHostGetDevicePointer(&made->mark_at, marks_ + index, 0),
                               "cuMemHostGetDevicePointer")) {
    return nullptr;
  }
  found = std::move(made);
  return found.get();
}

DeviceCopy::Capture DeviceCopy::capturing(std::span<const DeviceStream> streams) {
  for (const DeviceStream& one : streams) {
    Device* const on = usable() ? device(one.device) : nullptr;
    if (on == nullptr) {
      return Capture::kNone;
    }
    const Context context(api_, on->context);
    int status = cuda::kCaptureNone;
    const cuda::Result result = api_.streamIsCapturing(one.stream, &status);
    if (result == cuda::kCaptureImplicit) {
      return Capture::kOthers;
    }
    if (!ok(result, "cuStreamIsCapturing")) {
      return Capture::kNone;
    }
    if (status != cuda::kCaptureNone) {
      return Capture::kThese;
    }
  }
  return Capture::kNone;
}

bool DeviceCopy::begin(std::span<const DeviceStream> streams) {
  for (const DeviceStream& one : streams) {
    Device* const on = usable() ? device(one.device) : nullptr;
    if (on == nullptr) {
      return false;
    }
    const Context context(api_, on->context);
    if (!ok(api_.eventRecord(on->event, one.stream), "cuEventRecord") ||
        !ok(api_.streamWaitEvent(on->stream, on->event, 0), "cuStreamWaitEvent")) {
      return false;
    }
  }
  return true;
}

bool DeviceCopy::hold(std::span<const DeviceStream> streams) {
  for (const DeviceStream& one : streams) {
    Device* const on = usable() ? device(one.device) : nullptr;
    if (on == nullptr) {
      return false;
    }
    const Context context(api_, on->context);
    if (!ok(api_.eventRecord(on->event, on->stream), "cuEventRecord") ||
        !ok(api_.streamWaitEvent(one.stream, on->event, 0), "cuStreamWaitEvent")) {
      return false;
    }
  }
  return true;
}

bool DeviceCopy::copy(int index, std::byte* to, const void* from, size_t bytes) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  return ok(api_.memcpyDtoHAsync(to, reinterpret_cast<cuda::Pointer>(from), bytes, on->stream),
            "cuMemcpyDtoHAsync");
}

bool DeviceCopy::prepareSum(int index) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  if (on->sum == nullptr) {
    const Context context(api_, on->context);
    on->sum = DeviceXor::on(api_, index);
  }
  return on->sum != nullptr;
}

bool DeviceCopy::hasSum(int index) const {
  const auto& found = devices_.at(static_cast<size_t>(index));
  return found != nullptr && found->sum != nullptr;
}

template <typename Fn>
bool DeviceCopy::withSum(int index, const char* call, Fn fn) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr || on->sum == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  return ok(fn(*on->sum, on->stream), call);
}

bool DeviceCopy::clearSum(int index, size_t bytes) {
  return withSum(index, "cuMemsetD8Async",
                 [&](DeviceXor& sum, cuda::Stream stream) { return sum.clear(bytes, stream); });
}

bool DeviceCopy::putIntoCell(int index, size_t at, const void* from, size_t bytes) {
  return withSum(index, "cuMemcpyDtoDAsync", [&](DeviceXor& sum, cuda::Stream stream) {
    return sum.put(at, reinterpret_cast<cuda::Pointer>(from), bytes, stream);
  });
}

bool DeviceCopy::addCell(int index, size_t at, size_t bytes) {
  return withSum(index, "cuLaunchKernel",
                 [&](DeviceXor& sum, cuda::Stream stream) { return sum.add(at, bytes, stream); });
}

bool DeviceCopy::takeSum(int index, std::byte* to, size_t bytes) {
  return withSum(index, "cuMemcpyDtoHAsync",
                 [&](DeviceXor& sum, cuda::Stream stream) { return sum.take(to, bytes, stream); });
}

bool DeviceCopy::after(int index, cuda::Event event) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  return ok(api_.streamWaitEvent(on->stream, event, 0), "cuStreamWaitEvent");
}

bool DeviceCopy::stamp(int index, cuda::Event event) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  return ok(api_.eventRecord(event, on->stream), "cuEventRecord");
}

std::optional<bool> DeviceCopy::passed(int index, cuda::Event event) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return std::nullopt;
  }
  const Context context(api_, on->context);
  const cuda::Result result = api_.eventQuery(event);
  if (result == cuda::kNotReady) {
    return false;
  }
  return ok(result, "cuEventQuery") ? std::optional<bool>(true) : std::nullopt;
}

bool DeviceCopy::elapsed(int index, cuda::Event begin, cuda::Event end, int64_t& ns) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  float ms = 0;
  if (!ok(api_.eventElapsedTime(&ms, begin, end), "cuEventElapsedTime")) {
    return false;
  }
  ns = static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  return true;
}

bool DeviceCopy::follow(DeviceMarks& marks, const DeviceStream& stream) {
  Device* const on = usable() ? device(stream.device) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  return marks.follow(api_, stream);
}

void DeviceCopy::mark(DeviceMarks& marks, const OpEvent& mark, const DeviceStream& stream) {
  if (Device* const on = usable() ? device(stream.device) : nullptr) {
    const Context context(api_, on->context);
    marks.mark(mark, stream);
  }
}

bool DeviceCopy::submit(int index, Ticket& ticket) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  if (!ok(api_.streamWriteValue32(on->stream, on->mark_at, on->submitted + 1, 0),
          "cuStreamWriteValue32")) {
    return false;
  }
  ticket = {index, ++on->submitted};
  return true;
}

bool DeviceCopy::landed(const Ticket& ticket) const {
  // Of numbers that wrap around; they never lie half a round apart.
  return ticket.device < 0 || marks_ == nullptr ||
         static_cast<int32_t>(marks_[ticket.device].load(std::memory_order_acquire) -
                              ticket.number) >= 0;
}

bool DeviceCopy::probe(int index) {
  Device* const on = usable() ? device(index) : nullptr;
  if (on == nullptr) {
    return false;
  }
  const Context context(api_, on->context);
  const cuda::Result result = api_.streamQuery(on->stream);
  return result == cuda::kNotReady || ok(result, "cuStreamQuery");
}

// Registering needs some context; the memory is pinned for all devices.
cuda::Context DeviceCopy::anyContext() const {
  cuda::Context any = nullptr;
  api_.ctxGetCurrent(&any);
  for (const auto& one : devices_) {
    any = one != nullptr ? one->context : any;
  }
  return any;
}

bool DeviceCopy::pin(void* address, size_t bytes) {
  const auto found = pinned_.find(address);
  if (found != pinned_.end() && found->second >= bytes) {
    return true;
  }
  unpin(address);
  const Context context(api_, anyContext());
  if (!usable()) {
    return false;
  }
  if (!ok(api_.memHostRegister(address, bytes, cuda::kHostRegisterPortable), "cuMemHostRegister")) {
    return false;
  }
  pinned_[address] = bytes;
  return true;
}

void DeviceCopy::unpin(void* address) {
  const auto found = pinned_.find(address);
  if (found == pinned_.end()) {
    return;
  }
  pinned_.erase(found);
  const Context context(api_, anyContext());
  ok(api_.memHostUnregister(address), "cuMemHostUnregister");
}

}  // namespace reft
