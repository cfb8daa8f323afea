// What happens to the ops of this process, told to one listener as it happens: a bounded ring that
// the op log writes (OpLog::tell) and the copy thread reads, to know when the host stands idle.
//
// push() takes no lock, allocates nothing and makes no system call, but for waking a listener that
// sleeps and has asked for this kind of event. A full ring loses the event and counts it: the
// listener has to live with what it did not hear.
//
// Threads: push() and wake() from any thread; poll() and sleep() from one at a time, the
// listener's. Errors:  none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "intercept/base/clock.h"
#include "intercept/record/op_log.h"

namespace reft {

struct OpEvent {
  enum What : uint8_t {
    kBegin,  // an op, or a step boundary (kind kStep); the other fields of an op are set here only
    kWaitBegin,  // the host waits for the op
    kWaitEnd,
    kDone,
    kSnapshot,  // of the snapshot engine: one of step `ticket` has begun, see
                // snapshot/placement/op_listener.h
    kGate,      // of the snapshot engine: the optimizer is about to write
  };
  What what = kBegin;
  OpKind kind = OpKind::kUnknown;
  uint32_t group = 0;
  int32_t peer = -1;
  uint32_t tag = 0;
  uint64_t ticket = 0;
  int64_t at_ns = 0;
  uint64_t bytes = 0;
  uint64_t signature = 0;
  uint32_t mark = 0;  // of DeviceMarks only: where in its pool the event is that was recorded
};

class OpEvents {
 public:
  static constexpr uint32_t bit(OpEvent::What what) { return uint32_t{1} << what; }
  static constexpr size_t kCapacity = 4096;  // events; a power of two

  OpEvents();
  OpEvents(const OpEvents&) = delete;
  OpEvents& operator=(const OpEvents&) = delete;

  void push(const OpEvent& event) noexcept;
  // Ends the listener's sleep.
  void wake() noexcept;
  // As push() does, for something that the listener hears of in another way: ends its sleep if it
  // sleeps for that kind of event.
  void nudge(OpEvent::What what) noexcept {
    if ((wanted_.load(std::memory_order_seq_cst) & bit(what)) != 0) {
      wake();
    }
  }

  // The oldest event that was not yet polled. False: there is none, or its writer has not finished
  // it.
  bool poll(OpEvent& event) noexcept;
  bool pending() const;  // whether there is one
  // Sleeps until an event of the kinds in `mask` is pushed, the ring is half full, wake() is called
  // or the clock stands at `until_ns` (INT64_MAX: never). Returns at once if there is something to
  // poll and `mask` is not 0, or if `ready()`, which is asked after the listener can be woken, so
  // that nothing is missed that wakes it.
  template <typename Ready>
  void sleep(uint32_t mask, int64_t until_ns, const Clock& clock, Ready ready) {
    wanted_.store(mask | kHalfFull, std::memory_order_seq_cst);
    if (!ready() && !(mask != 0 && pending()) && !halfFull()) {
      block(mask | kHalfFull, until_ns, clock);
    }
    wanted_.store(0, std::memory_order_relaxed);
  }

  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kHalfFull = uint32_t{1} << 31;
  struct alignas(64) Slot {
    std::atomic<uint64_t> turn;
    OpEvent event;
  };
  static_assert(sizeof(Slot) == 64);

  bool halfFull() const;
  void block(uint32_t wanted, int64_t until_ns, const Clock& clock);

  std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<uint64_t> head_{0};  // next to be written
  std::atomic<uint64_t> lost_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};  // next to be read; moved by the listener alone
  alignas(64) std::atomic<uint32_t> wanted_{
      0};  // 0: the listener is awake; else what ends its sleep
};

// Of this process. Never destroyed, as the op log is.
OpEvents& processOpEvents();

}  // namespace reft
