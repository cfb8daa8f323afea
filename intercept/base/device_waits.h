// Where a stream that trains begins and ends to wait for an op, by the device's own clock.
//
// Waiting for an op of a device does not hold up the host: it makes the current stream wait. Around such a wait an event is recorded on
// that stream (never on one that communicates), so that copies can begin when the device comes to the first one, and the time between
// the two tells how long the device stood idle. What was recorded is told to one listener, in the order of the stream.
//
// Nothing is recorded while nobody watches, on another stream than the one that is watched, on a stream that is being captured into a
// graph, when the pool of events is empty, or after a call has failed: such marks are counted as lost, and training goes on.
//
// The fields of an OpEvent here: kSnapshot is a program point (`ticket`: the step), kWaitBegin and kWaitEnd are told with the fields of
// the op, kGate and kDone enclose what makes the stream wait for copies. `mark`: the event, the listener's until it gives it back.
//
// Threads: watch() and ignore() from the thread that trains; poll() from one at a time, the listener's; the rest from any. mark() takes no lock and allocates nothing; it makes three calls of the driver.
// Errors:  none.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "intercept/base/cuda_api.h"
#include "intercept/base/op_events.h"

namespace reft {

// A stream that trains, on its device.
struct DeviceStream {
  int device = -1;
  cuda::Stream stream = nullptr;
};

class DeviceWaits {
 public:
  static constexpr uint32_t kEvents = 2048;  // more waits between two looks of the listener are lost

  DeviceWaits() = default;
  ~DeviceWaits();
  DeviceWaits(const DeviceWaits&) = delete;
  DeviceWaits& operator=(const DeviceWaits&) = delete;

  // From now on marks are recorded on this stream, whose device's context is current. `api` has to outlive it. False: no events can be
  // had. It watches the device that it watched first; another one is refused.
  bool watch(const CudaApi& api, const DeviceStream& stream) noexcept;
  void ignore() noexcept { watching_.store(false, std::memory_order_release); }
  bool watching() const noexcept { return watching_.load(std::memory_order_acquire); }

  // `mark.mark` is filled in.
  void mark(OpEvent mark, const DeviceStream& stream) noexcept;

  bool poll(OpEvent& mark) noexcept { return marks_.poll(mark); }
  cuda::Event event(uint32_t mark) const { return events_[mark]; }
  // One for the listener's own use; nullopt: none is left.
  std::optional<uint32_t> take() noexcept;
  void giveBack(uint32_t mark) noexcept { used_[mark].store(false, std::memory_order_release); }
  uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed) + marks_.lost(); }

 private:
  const CudaApi* api_ = nullptr;  // once there are events
  int device_ = -1;               // theirs
  std::array<cuda::Event, kEvents> events_{};
  std::array<std::atomic<bool>, kEvents> used_{};
  std::atomic<uint32_t> next_{0};
  std::atomic<cuda::Stream> stream_{nullptr};
  std::atomic<bool> watching_{false};
  std::atomic<uint64_t> lost_{0};
  OpEvents marks_;
};

// Of this process. Never destroyed, as the op log is.
DeviceWaits& processDeviceWaits();

}  // namespace reft
