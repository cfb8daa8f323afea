// Marks on the stream that trains, timed by the device's own clock: where steps begin, where the
// stream waits for an op, where it waits for copies.
//
// A wait for an op of a device does not block the host: it makes the current stream wait. An event
// is recorded before and after such a wait, on that stream and never on one that communicates.
// Copies can begin when the device reaches the first, and the time between the two is the device's
// idle time. One listener receives the marks in stream order.
//
// Nothing is recorded while no listener follows, or on another stream. A mark is lost, and counted,
// on a stream that is being captured into a graph, when the pool of events is empty, or when a call
// fails; training continues. Part of the pool is reserved for program points and gates, so that a
// step with very many waits or copies still has a beginning and an end.
//
// Fields of an OpEvent here: kBegin of kind kStep is a program point (`ticket`: the step);
// kWaitBegin and kWaitEnd carry the fields of the op; kGate and kDone enclose the stream's wait for
// copies before the optimizer. `mark` is the event, which belongs to the listener until it gives it
// back.
//
// Threads: follow(), watch() and ignore() from the thread that trains; poll() from one at a time,
// the
//          listener's; the rest from any. mark() and markWait() take no lock and allocate nothing;
//          they make two calls to the driver.
// Errors:  none.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "intercept/driver/cuda_api.h"
#include "intercept/record/op_events.h"

namespace reft {

// A stream that trains, on its device.
struct DeviceStream {
  int device = -1;
  cuda::Stream stream = nullptr;
  bool lasting = false;  // lives as long as the process

  bool operator==(const DeviceStream& other) const {
    return device == other.device && stream == other.stream;
  }
};

class DeviceMarks {
 public:
  static constexpr uint32_t kEvents = 2048;  // limit of marks between two polls; more are lost
  static constexpr uint32_t kReserved = 512;

  // `listener` is nudged when a wait begins.
  explicit DeviceMarks(OpEvents* listener = nullptr) : listener_(listener) {}
  ~DeviceMarks();
  DeviceMarks(const DeviceMarks&) = delete;
  DeviceMarks& operator=(const DeviceMarks&) = delete;

  // Records marks on this stream from now on; its device's context must be current, and `api` must
  // outlive the object. Returns false if the driver gives no events, or for a second device: the
  // first one followed stays.
  bool follow(const CudaApi& api, const DeviceStream& stream) noexcept;
  void forget() noexcept;
  // Whether waits are marked as well.
  void watch() noexcept { watching_.store(following(), std::memory_order_release); }
  void ignore() noexcept { watching_.store(false, std::memory_order_release); }
  bool following() const noexcept { return following_.load(std::memory_order_acquire); }
  bool watching() const noexcept { return watching_.load(std::memory_order_acquire); }

  // Fills in `mark.mark`. Returns false if nothing was recorded.
  bool mark(OpEvent mark, const DeviceStream& stream) noexcept;
  // Marks the begin of a wait. If it returns true, call mark() at the end of the wait.
  bool markWait(const OpEvent& begin, const DeviceStream& stream) noexcept {
    return watching() && mark(begin, stream);
  }

  bool poll(OpEvent& mark) noexcept { return marks_.poll(mark); }
  bool pending() const noexcept { return marks_.pending(); }
  cuda::Event event(uint32_t mark) const { return events_[mark]; }
  // An event for the listener's own use; nullopt if the pool is empty.
  std::optional<uint32_t> take() noexcept { return take(/*reserved=*/false); }
  void giveBack(uint32_t mark) noexcept;
  uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed) + marks_.lost(); }

 private:
  std::optional<uint32_t> take(bool reserved) noexcept;

  OpEvents* const listener_;
  const CudaApi* api_ = nullptr;  // set with the events
  int device_ = -1;               // device of the events
  std::array<cuda::Event, kEvents> events_{};
  std::array<std::atomic<bool>, kEvents> used_{};
  std::atomic<uint32_t> next_{0};
  std::atomic<uint32_t> in_use_{0};
  std::atomic<cuda::Stream> stream_{nullptr};
  std::atomic<bool> following_{false};
  std::atomic<bool> watching_{false};
  std::atomic<uint64_t> lost_{0};
  OpEvents marks_;
};

// The marks of this process. Never destroyed, as the op log.
DeviceMarks& processDeviceMarks();

}  // namespace reft
