// What a stream that trains leaves behind by the device's own clock: where its steps begin, where
// it begins and ends to wait for an op, where it waits for copies.
//
// Waiting for an op of a device does not hold up the host: it makes the current stream wait. Around
// such a wait an event is recorded on that stream (never on one that communicates), so that copies
// can begin when the device comes to the first one, and the time between the two tells how long the
// device stood idle. What was recorded is told to one listener, in the order of the stream.
//
// Nothing is recorded while nobody listens or on another stream than the one that is followed. A
// mark is lost, and counted, on a stream that is being captured into a graph, when the pool of
// events is empty, or when a call fails; training goes on. A part of the pool is for program points
// and gates alone, so that a step with very many waits or copies still has a beginning and an end.
//
// The fields of an OpEvent here: kBegin of kind kStep is a program point (`ticket`: the step),
// kWaitBegin and kWaitEnd are told with the fields of the op, kGate and kDone enclose what makes
// the stream wait for copies before the optimizer. `mark`: the event, the listener's until it gives
// it back.
//
// Threads: follow(), watch() and ignore() from the thread that trains; poll() from one at a time,
// the listener's; the rest from any.
//          mark() and markWait() take no lock and allocate nothing; they make two calls of the
//          driver.
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
  bool lasting = false;  // it is not destroyed while the process lives

  bool operator==(const DeviceStream& other) const {
    return device == other.device && stream == other.stream;
  }
};

class DeviceMarks {
 public:
  static constexpr uint32_t kEvents =
      2048;  // more marks between two looks of the listener are lost
  static constexpr uint32_t kReserved = 512;

  // `listener`: nudged when a wait begins.
  explicit DeviceMarks(OpEvents* listener = nullptr) : listener_(listener) {}
  ~DeviceMarks();
  DeviceMarks(const DeviceMarks&) = delete;
  DeviceMarks& operator=(const DeviceMarks&) = delete;

  // From now on marks are recorded on this stream, whose device's context is current. `api` has to
  // outlive it. False: no events can be had. It follows the device that it followed first; another
  // one is refused.
  bool follow(const CudaApi& api, const DeviceStream& stream) noexcept;
  void forget() noexcept;
  // Whether waits are marked, too.
  void watch() noexcept { watching_.store(following(), std::memory_order_release); }
  void ignore() noexcept { watching_.store(false, std::memory_order_release); }
  bool following() const noexcept { return following_.load(std::memory_order_acquire); }
  bool watching() const noexcept { return watching_.load(std::memory_order_acquire); }

  // `mark.mark` is filled in. False: it is not marked.
  bool mark(OpEvent mark, const DeviceStream& stream) noexcept;
  // The begin of a wait; if it is marked, mark() is to be called for its end.
  bool markWait(const OpEvent& begin, const DeviceStream& stream) noexcept {
    return watching() && mark(begin, stream);
  }

  bool poll(OpEvent& mark) noexcept { return marks_.poll(mark); }
  bool pending() const noexcept { return marks_.pending(); }
  cuda::Event event(uint32_t mark) const { return events_[mark]; }
  // One for the listener's own use; nullopt: none is left.
  std::optional<uint32_t> take() noexcept { return take(/*reserved=*/false); }
  void giveBack(uint32_t mark) noexcept;
  uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed) + marks_.lost(); }

 private:
  std::optional<uint32_t> take(bool reserved) noexcept;

  OpEvents* const listener_;
  const CudaApi* api_ = nullptr;  // once there are events
  int device_ = -1;               // theirs
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

// Of this process. Never destroyed, as the op log is.
DeviceMarks& processDeviceMarks();

}  // namespace reft
