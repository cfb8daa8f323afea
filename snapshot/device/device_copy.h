// Copies device memory into host memory beside the work of the device that trains.
//
// Each device has one copy stream of the lowest priority. Copies enqueued after begin() wait, on
// the device, until the streams that train reach that point; work enqueued on these streams after
// hold() waits, on the device, for all copies so far. The host never waits for a stream, and asks a
// stream that trains only whether it is captured: it reads from host memory whether a copy has
// landed, where the copy stream writes a number.
//
// No work begins on a stream that is captured into a graph, and no call breaks another capture.
// Only devices that are named get a context: the one that they have already (the primary one).
//
// Threads: begin(), hold(), follow() and mark() from the thread that trains; copy(), sums,
// after(), stamp() and submit() from one thread at a time (the holder of the snapshot's fetch
// lock); memory(), pin() and unpin() while no copy is under way; the rest from any. Errors: none
// are thrown. The first failed call ends it for good: usable() is false, why() gives the reason,
// and each later call returns false and does nothing. The training deals with a failed device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "intercept/base/mutex.h"
#include "intercept/driver/cuda_api.h"
#include "intercept/record/device_marks.h"
#include "snapshot/device/device_xor.h"

namespace reft {

class DeviceCopy {
 public:
  // A point of a device's copy stream.
  struct Ticket {
    int device = -1;
    uint32_t number = 0;
  };

  // `api` has to outlive it.
  explicit DeviceCopy(const CudaApi& api);
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  bool usable() const { return usable_.load(std::memory_order_acquire); }
  std::string why() const;

  // Whether a graph capture forbids begin() and hold(): one of the streams is captured, or another
  // one is while the legacy stream is among them.
  enum class Capture { kNone, kThese, kOthers };
  Capture capturing(std::span<const DeviceStream> streams);
  bool begin(std::span<const DeviceStream> streams);
  bool hold(std::span<const DeviceStream> streams);

  // `to` lies in pinned memory.
  bool copy(int device, std::byte* to, const void* from, size_t bytes);
  // Makes sums on the device possible (snapshot/device/device_xor.h). From the thread that trains,
  // before the first of them. False: DeviceXor::hindrance() says why, or
  // this object has no copy stream.
  bool prepareSum(int device);
  bool hasSum(int device) const;
  // The first `bytes` of the sum become zeros; bytes of the device become those of a cell, `at`
  // bytes into it; those of the cell are added to the sum; and it is copied, into pinned memory.
  // All in the order of the copies.
  bool clearSum(int device, size_t bytes);
  bool putIntoCell(int device, size_t at, const void* from, size_t bytes);
  bool addCell(int device, size_t at, size_t bytes);
  bool takeSum(int device, std::byte* to, size_t bytes);
  // Copies enqueued from now on wait, on the device, for `event`.
  bool after(int device, cuda::Event event);
  // Records `event` on the copy stream.
  bool stamp(int device, cuda::Event event);
  // Whether the device has passed an event that was recorded outside of captures; nullopt: unknown
  // after an error.
  std::optional<bool> passed(int device, cuda::Event event);
  // Between two events that keep times and were passed.
  bool elapsed(int device, cuda::Event begin, cuda::Event end, int64_t& ns);
  // As DeviceMarks::follow() and mark(), in the context of the stream's device.
  bool follow(DeviceMarks& marks, const DeviceStream& stream);
  void mark(DeviceMarks& marks, const OpEvent& mark, const DeviceStream& stream);
  // The ticket lands when all copies enqueued on `device` so far have landed.
  bool submit(int device, Ticket& ticket);
  bool landed(const Ticket& ticket) const;  // no CUDA call
  // After a long wait: whether the copy stream still works. False: its device has failed.
  bool probe(int device);

  // Pinned memory that lives as long as this object; nullptr: none can be had.
  std::byte* memory(size_t bytes);
  // Pins memory once; the same address with more bytes is pinned anew.
  bool pin(void* address, size_t bytes);
  void unpin(void* address);

 private:
  struct Device {
    cuda::Context context = nullptr;
    cuda::Stream stream = nullptr;
    cuda::Event event = nullptr;  // on a stream that trains, or on the copy stream
    cuda::Pointer mark_at = 0;    // of its number in marks_, for the device
    uint32_t submitted = 0;
    std::unique_ptr<DeviceXor> sum;
  };
  class Context;  // of a device, for the calling thread; relaxed towards captures

  static constexpr int kMaxDevices = 64;
  Device* device(int index);  // made at its first use; nullptr if it cannot be had
  bool ok(cuda::Result result, const char* call);
  // Calls fn(sum, stream) on a device that has a sum, in its context.
  template <typename Fn>
  bool withSum(int device, const char* call, Fn fn);
  cuda::Context anyContext() const;

  const CudaApi& api_;
  std::atomic<bool> usable_{true};
  mutable Mutex mutex_;
  std::string why_ GUARDED_BY(mutex_);
  std::array<std::unique_ptr<Device>, kMaxDevices>
      devices_;  // made by the thread that trains, before others use them
  std::atomic<uint32_t>* marks_ = nullptr;  // one number per device, in a pinned page
  std::map<void*, size_t> pinned_;
  std::vector<std::pair<void*, size_t>> own_;  // mapped by memory()
};

}  // namespace reft
