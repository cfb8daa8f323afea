// Where ops stand on their device, as the device itself says.
//
// An op on a device is enqueued and its caller goes on: that the host has begun it does not show
// whether the device ever comes to it. So the stream on which an op is called writes the op's
// ticket into host memory when it reaches the op, and a stream that waits for the op writes it
// again when it has passed it. A rank whose device is behind is told from ranks whose device waits
// in the op by reading host memory: no call to the driver, which may block for ever once a kernel
// hangs.
//
// The writes are operations of the stream (cuStreamWriteValue32), no events: they are not timed,
// and none is put on a stream that communicates. Nothing is written while a stream is captured into
// a graph (the graph would write old tickets at each replay), after the driver has refused once, or
// before use(true).
//
// Threads: any. No lock; two calls to the driver for each mark, and none by reached() and passed().
//          probe() may block for ever.
// Errors:  none. A mark that cannot be made is missing, which proves nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "intercept/base/mutex.h"
#include "intercept/driver/cuda_api.h"

namespace reft {

class DeviceOps {
 public:
  // Tickets whose marks are remembered. A device is never so many collectives behind its host: a
  // queue takes 1024 launches.
  static constexpr uint64_t kOps = 4096;

  // `api`: nullptr = that of the process, which is loaded when the first mark is made. It must
  // outlive the object; so must the object what its streams were asked to do.
  explicit DeviceOps(const CudaApi* api = nullptr) : api_(api) {}
  DeviceOps(const DeviceOps&) = delete;
  DeviceOps& operator=(const DeviceOps&) = delete;

  void use(bool on) noexcept { used_.store(on, std::memory_order_relaxed); }
  bool used() const noexcept { return used_.load(std::memory_order_relaxed); }

  // Asks `stream`, whose context must be current, to say when it comes to this place. Return false
  // if it was not asked.
  bool markReach(uint64_t ticket, cuda::Stream stream) noexcept {
    return used() && write(reached_, ticket, stream);
  }
  bool markPass(uint64_t ticket, cuda::Stream stream) noexcept {
    return used() && write(passed_, ticket, stream);
  }

  // Asks the driver whether the device of the first mark still answers without an error, which
  // noteResult() keeps: a script that has caught the error may call nothing more of reft's. Asks
  // about an event that no stream ever records, so that no capture is disturbed. Nothing before the
  // first mark.
  void probe() const noexcept;

  // Whether a stream that was asked has come there.
  bool reached(uint64_t ticket) const noexcept { return has(reached_, ticket); }
  bool passed(uint64_t ticket) const noexcept { return has(passed_, ticket); }

 private:
  using Words = std::array<std::atomic<uint32_t>, kOps>;
  enum class State : uint8_t { kUntried, kReady, kRefused };

  bool ready() noexcept;
  bool write(const Words& words, uint64_t ticket, cuda::Stream stream) noexcept;
  static bool has(const Words& words, uint64_t ticket) noexcept {
    return words[ticket % kOps].load(std::memory_order_acquire) == static_cast<uint32_t>(ticket);
  }

  // One range of pages, which the devices see.
  alignas(4096) Words reached_{};
  Words passed_{};
  std::atomic<bool> used_{false};
  std::atomic<State> state_{State::kUntried};
  Mutex registering_;
  const CudaApi* api_;
  cuda::Pointer at_ = 0;  // of reached_ on the devices
  // Both set before state_ is kReady. nullptr: none.
  cuda::Context context_ = nullptr;
  cuda::Event never_recorded_ = nullptr;
};

// The marks of this process. Never destroyed: a stream may write after static destructors.
DeviceOps& processDeviceOps();

}  // namespace reft
