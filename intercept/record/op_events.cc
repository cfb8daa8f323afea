#include "intercept/record/op_events.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

namespace reft {

namespace {

constexpr uint64_t kMask = OpEvents::kCapacity - 1;
// A half full ring wakes its listener at every so many events: once is enough unless the listener
// went to sleep in between.
constexpr uint64_t kHalfFullEvery = 64;

}  // namespace

// After D. Vyukov's bounded queue: slot i may be written in turn i, i + capacity, …, and read in
// the turn after each.
OpEvents::OpEvents() : slots_(new Slot[kCapacity]) {
  for (size_t i = 0; i < kCapacity; ++i) {
    slots_[i].turn.store(i, std::memory_order_relaxed);
  }
}

void OpEvents::push(const OpEvent& event) noexcept {
  uint64_t at = head_.load(std::memory_order_relaxed);
  while (true) {
    const auto ahead =
        static_cast<int64_t>(slots_[at & kMask].turn.load(std::memory_order_acquire) - at);
    if (ahead < 0) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (ahead > 0) {
      at = head_.load(std::memory_order_relaxed);
    } else if (head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
      break;
    }
  }
  Slot& slot = slots_[at & kMask];
  slot.event = event;
  // In one order with what sleep() does: either the listener sees this event, or it is seen to
  // sleep here.
  slot.turn.store(at + 1, std::memory_order_seq_cst);
  const uint32_t wanted = wanted_.load(std::memory_order_seq_cst);
  if (wanted == 0) {
    return;
  }
  const bool full =
      at % kHalfFullEvery == 0 && at - tail_.load(std::memory_order_relaxed) >= kCapacity / 2;
  if ((wanted & bit(event.what)) != 0 || full) {
    wake();
  }
}

void OpEvents::wake() noexcept {
  if (wanted_.exchange(0, std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &wanted_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
}

bool OpEvents::poll(OpEvent& event) noexcept {
  const uint64_t at = tail_.load(std::memory_order_relaxed);
  Slot& slot = slots_[at & kMask];
  if (slot.turn.load(std::memory_order_acquire) != at + 1) {
    return false;
  }
  event = slot.event;
  slot.turn.store(at + kCapacity, std::memory_order_release);
  tail_.store(at + 1, std::memory_order_relaxed);
  return true;
}

bool OpEvents::pending() const {
  const uint64_t at = tail_.load(std::memory_order_relaxed);
  return slots_[at & kMask].turn.load(std::memory_order_seq_cst) == at + 1;
}

bool OpEvents::halfFull() const {
  return head_.load(std::memory_order_relaxed) - tail_.load(std::memory_order_relaxed) >=
         kCapacity / 2;
}

void OpEvents::block(uint32_t wanted, int64_t until_ns, const Clock& clock) {
  static_assert(sizeof(wanted_) == sizeof(uint32_t));
  timespec span{};
  const bool bounded = until_ns != std::numeric_limits<int64_t>::max();
  if (bounded) {
    const int64_t left = until_ns - clock.nowNs();
    if (left <= 0) {
      return;
    }
    span.tv_sec = left / 1'000'000'000;
    span.tv_nsec = left % 1'000'000'000;
  }
  // One wait: whoever calls looks at everything again, so that it may end early.
  ::syscall(SYS_futex, &wanted_, FUTEX_WAIT_PRIVATE, wanted, bounded ? &span : nullptr, nullptr, 0);
}

OpEvents& processOpEvents() {
  static auto* events = new OpEvents;
  return *events;
}

}  // namespace reft
