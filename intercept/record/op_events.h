// The ops of this process as events for one listener: a bounded ring that the op log writes
// (OpLog::tell) and the copy thread reads, to detect when the host is idle.
//
// push() takes no lock and allocates nothing. Its only system call wakes a listener that sleeps and
// waits for this kind of event. A full ring loses the event and counts it: the listener must
// tolerate gaps.
//
// Threads: push() and wake() from any; poll() and sleep() from one at a time, the listener's.
// Errors:  none.
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
    kBegin,  // an op, or a step boundary (kind kStep); only this event has the other fields of an
             // op
    kWaitBegin,  // the host waits for the op
    kWaitEnd,
    kDone,
    // From the snapshot engine (snapshot/placement/op_listener.h):
    kSnapshot,  // the snapshot of step `ticket` begins
    kGate,      // the optimizer is about to write
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
  uint32_t mark = 0;  // from DeviceMarks only: index of the recorded event in its pool
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
  // Ends the listener's sleep if it waits for that kind of event, which it receives in another way.
  void nudge(OpEvent::What what) noexcept {
    if ((wanted_.load(std::memory_order_seq_cst) & bit(what)) != 0) {
      wake();
    }
  }

  // Takes the oldest event. Returns false if the ring is empty, or the event is still being
  // written.
  bool poll(OpEvent& event) noexcept;
  bool pending() const;  // whether poll() has something to take
  // Sleeps until an event of the kinds in `mask` is pushed, the ring is half full, wake() is called
  // or the clock reaches `until_ns` (INT64_MAX: never). Returns at once if an event is pending and
  // `mask` is not 0, or if `ready()` returns true. It calls ready() after the listener can be
  // woken, so that no wake-up is missed.
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
  alignas(64) std::atomic<uint64_t> tail_{0};  // next to be read; only the listener moves it
  // 0: the listener is awake; else the kinds that end its sleep.
  alignas(64) std::atomic<uint32_t> wanted_{0};
};

// The events of this process. Never destroyed, as the op log.
OpEvents& processOpEvents();

}  // namespace reft
