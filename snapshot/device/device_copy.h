// Copies device memory into host memory beside the work of the device that trains.
//
// Each device has one copy stream of the lowest priority. What is copied after begin() waits, on
// the device, until the streams that train have come to that point; what these streams do after
// hold() waits, on the device, for the copies that were asked for until then. The host never waits
// for a stream, and of one that trains it only asks whether it is being captured: whether a copy
// has landed is read from host memory, where the copy stream leaves a number.
//
// Nothing is begun on a stream that is being captured into a graph, and no call breaks a capture of
// somebody else. Only devices that are named get a context, which is the one that they have already
// (the primary one).
//
// Threads: begin(), hold(), follow() and mark() from the thread that trains; copy(), after(),
// stamp() and submit() from one thread at a time
//          (whoever holds the snapshot's fetch lock); memory(), pin() and unpin() while no copy is
//          under way; the rest from any.
// Errors:  none is thrown. The first failed call ends it for good: usable() is false, why() says
// it, each later call does nothing
//          and says no. A device that has failed is the training's to deal with.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "intercept/driver/cuda_api.h"
#include "intercept/record/device_marks.h"

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

  // Whether nothing may be begun, and nothing can be held back, because one of them is being
  // captured, or because another stream is and one of them is the legacy stream.
  enum class Capture { kNone, kThese, kOthers };
  Capture capturing(std::span<const DeviceStream> streams);
  bool begin(std::span<const DeviceStream> streams);
  bool hold(std::span<const DeviceStream> streams);

  // `to` lies in pinned memory.
  bool copy(int device, std::byte* to, const void* from, size_t bytes);
  // What is copied from now on waits, on the device, for `event`.
  bool after(int device, cuda::Event event);
  // Records `event` on the copy stream.
  bool stamp(int device, cuda::Event event);
  // Whether the device has come past an event that was recorded outside of captures; nullopt: that
  // cannot be told any more.
  std::optional<bool> passed(int device, cuda::Event event);
  // Between two events that keep times and were passed.
  bool elapsed(int device, cuda::Event begin, cuda::Event end, int64_t& ns);
  // See there; the calling thread may have another device than the stream's.
  bool follow(DeviceMarks& marks, const DeviceStream& stream);
  void mark(DeviceMarks& marks, const OpEvent& mark, const DeviceStream& stream);
  // Everything that was asked of `device` so far has landed when the ticket has.
  bool submit(int device, Ticket& ticket);
  bool landed(const Ticket& ticket) const;  // no CUDA call
  // For whoever has waited long: asks the copy stream whether its device has failed. False: it has.
  bool probe(int device);

  // Pinned memory that lives as long as this object; nullptr: it cannot be had.
  std::byte* memory(size_t bytes);
  // Makes memory pinned, once; the same address with other bytes is pinned anew.
  bool pin(void* address, size_t bytes);
  void unpin(void* address);

 private:
  struct Device {
    cuda::Context context = nullptr;
    cuda::Stream stream = nullptr;
    cuda::Event event = nullptr;  // on a stream that trains, or on the copy stream
    cuda::Pointer mark_at = 0;    // of its number in marks_, for the device
    uint32_t submitted = 0;
  };
  class Context;  // of a device, for the calling thread; relaxed towards captures

  static constexpr int kMaxDevices = 64;
  Device* device(int index);  // made at its first use; nullptr if it cannot be had
  bool ok(cuda::Result result, const char* call);
  cuda::Context anyContext() const;

  const CudaApi& api_;
  std::atomic<bool> usable_{true};
  mutable std::mutex mutex_;  // why_
  std::string why_;
  std::array<std::unique_ptr<Device>, kMaxDevices>
      devices_;  // made by the thread that trains, before others use them
  std::atomic<uint32_t>* marks_ = nullptr;  // one number per device, in a pinned page
  std::map<void*, size_t> pinned_;
  std::vector<std::pair<void*, size_t>> own_;  // mapped by memory()
};

}  // namespace reft
