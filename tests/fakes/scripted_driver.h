// A CUDA driver without threads or clock: a stream that trains and one that copies, each as the
// time at which it ends by now, and events that are passed when the test says so. Copies are made
// at once, but have landed only when the device has come to their time. For what depends on the
// device's times; how streams order each other for real is the matter of tests/fakes/cuda.
//
// Threads: functions of the driver from any. Errors: `broken` fails queries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "intercept/base/clock.h"
#include "intercept/driver/cuda_api.h"

namespace reft {

class ScriptedDriver {
 public:
  ScriptedDriver() { current_ = this; }
  ~ScriptedDriver() { current_ = nullptr; }
  ScriptedDriver(const ScriptedDriver&) = delete;
  ScriptedDriver& operator=(const ScriptedDriver&) = delete;

  static constexpr cuda::Stream kTraining = nullptr;

  CudaApi api() const;
  int64_t timeOf(cuda::Event event) {
    const std::lock_guard lock(mutex);
    return times.at(event);
  }
  // The device is through with everything that was asked of it.
  void comeToTheEnd() {
    const std::lock_guard lock(mutex);
    device_ns = std::max(enqueued_ns, copies_until_ns);
    writePassed();
  }

  std::mutex mutex;             // of all below, where threads take part
  int64_t enqueued_ns = 0;      // where on the device's clock the training stream ends by now
  int64_t copies_until_ns = 0;  // and the copy stream
  double copy_ns_per_byte = 0;
  int64_t device_ns = 0;  // how far the device is
  std::map<cuda::Event, int64_t> times;
  uintptr_t events = 0;
  int recorded = 0;
  int queried = 0;
  std::map<std::thread::id, int> copies;  // calls, by who made them
  bool capturing = false;
  bool unrecordable = false;  // events on the training stream
  bool broken = false;

 private:
  struct Write {
    int64_t at_ns = 0;
    uint32_t* to = nullptr;
    uint32_t value = 0;
  };
  // Of numbers that say that copies have landed. Under the mutex.
  void writePassed() {
    for (; !writes_.empty() && writes_.front().at_ns <= device_ns; writes_.pop_front()) {
      __atomic_store_n(writes_.front().to, writes_.front().value, __ATOMIC_RELEASE);
    }
  }

  static inline ScriptedDriver* current_ = nullptr;
  std::deque<Write> writes_;
};

// The host's clock, always so far ahead of the device's. Not for waiting.
class ClockOfDevice final : public Clock {
 public:
  ClockOfDevice(ScriptedDriver& driver, int64_t ahead_ns) : driver_(driver), ahead_ns_(ahead_ns) {}
  int64_t nowNs() const override {
    const std::lock_guard lock(driver_.mutex);
    return driver_.device_ns + ahead_ns_;
  }

 private:
  ScriptedDriver& driver_;
  const int64_t ahead_ns_;
};

inline CudaApi ScriptedDriver::api() const {
  CudaApi api;
  api.devices = 1;
  api.ctxGetCurrent = [](cuda::Context* context) { return *context = nullptr, cuda::kSuccess; };
  api.ctxSetCurrent = [](cuda::Context) { return cuda::kSuccess; };
  api.ctxGetStreamPriorityRange = [](int* lowest, int* highest) {
    return *lowest = *highest = 0, cuda::kSuccess;
  };
  api.devicePrimaryCtxRetain = [](cuda::Context* context, cuda::Device) {
    return *context = current_, cuda::kSuccess;
  };
  api.devicePrimaryCtxRelease = [](cuda::Device) { return cuda::kSuccess; };
  api.memHostRegister = [](void*, size_t, unsigned) { return cuda::kSuccess; };
  api.memHostUnregister = [](void*) { return cuda::kSuccess; };
  api.memHostGetDevicePointer = [](cuda::Pointer* at, void* host, unsigned) {
    return *at = reinterpret_cast<cuda::Pointer>(host), cuda::kSuccess;
  };
  api.memcpyDtoHAsync = [](void* to, cuda::Pointer from, size_t bytes, cuda::Stream) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    const std::lock_guard lock(current_->mutex);
    ++current_->copies[std::this_thread::get_id()];
    current_->copies_until_ns +=
        static_cast<int64_t>(static_cast<double>(bytes) * current_->copy_ns_per_byte);
    return cuda::kSuccess;
  };
  api.streamCreate = [](cuda::Stream* stream, unsigned, int) {
    return *stream = current_, cuda::kSuccess;
  };
  api.streamDestroy = [](cuda::Stream) { return cuda::kSuccess; };
  api.streamQuery = [](cuda::Stream) { return cuda::kSuccess; };
  api.streamWaitEvent = [](cuda::Stream stream, cuda::Event event, unsigned) {
    const std::lock_guard lock(current_->mutex);
    int64_t& end_ns = stream == kTraining ? current_->enqueued_ns : current_->copies_until_ns;
    end_ns = std::max(end_ns, current_->times.at(event));
    return cuda::kSuccess;
  };
  api.streamIsCapturing = [](cuda::Stream, int* status) {
    const std::lock_guard lock(current_->mutex);
    return *status = current_->capturing ? 1 : 0, cuda::kSuccess;
  };
  api.streamWriteValue32 = [](cuda::Stream, cuda::Pointer to, uint32_t value, unsigned) {
    const std::lock_guard lock(current_->mutex);
    current_->writes_.push_back(
        {current_->copies_until_ns, reinterpret_cast<uint32_t*>(to), value});
    current_->writePassed();
    return cuda::kSuccess;
  };
  api.threadExchangeCaptureMode = [](int*) { return cuda::kSuccess; };
  api.eventCreate = [](cuda::Event* event, unsigned) {
    const std::lock_guard lock(current_->mutex);
    return *event = reinterpret_cast<cuda::Event>(++current_->events), cuda::kSuccess;
  };
  api.eventDestroy = [](cuda::Event) { return cuda::kSuccess; };
  api.eventRecord = [](cuda::Event event, cuda::Stream stream) {
    const std::lock_guard lock(current_->mutex);
    if (current_->unrecordable && stream == kTraining) {
      return 700;
    }
    current_->times[event] =
        stream == kTraining ? current_->enqueued_ns : current_->copies_until_ns;
    ++current_->recorded;
    return cuda::kSuccess;
  };
  api.eventQuery = [](cuda::Event event) {
    const std::lock_guard lock(current_->mutex);
    ++current_->queried;
    if (current_->broken) {
      return 700;
    }
    const auto recorded = current_->times.find(event);
    return recorded == current_->times.end() || recorded->second <= current_->device_ns
               ? cuda::kSuccess
               : cuda::kNotReady;
  };
  api.eventElapsedTime = [](float* ms, cuda::Event begin, cuda::Event end) {
    const std::lock_guard lock(current_->mutex);
    *ms = static_cast<float>(
        static_cast<double>(current_->times.at(end) - current_->times.at(begin)) / 1e6);
    return cuda::kSuccess;
  };
  return api;
}

}  // namespace reft
