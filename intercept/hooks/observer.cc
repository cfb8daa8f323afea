#include "intercept/hooks/observer.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "intercept/driver/lasting_errors.h"

namespace reft::hooks {

ActivityTable activity;
constinit thread_local ObservedThread observed_thread;

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr uint32_t kClaimEvery = 4096;  // calls of a thread that has found no slot

class KeepErrno {
 public:
  ~KeepErrno() { errno = saved_; }

 private:
  const int saved_ = errno;
};

bool isSet(const char* name, char value) {
  const char* const text = std::getenv(name);
  return text != nullptr && text[0] == value && text[1] == 0;
}

// The parent's threads, and their calls, do not exist in the child.
void forgetParent() {
  for (ActivitySlot& slot : activity.slots) {
    slot.owner.store(0, kRelaxed);
    slot.call.store(DriverCall::none, kRelaxed);
    slot.version.store(0, kRelaxed);
    slot.launch_ns.store(0, kRelaxed);
    for (auto& count : slot.counts) {
      count.store(0, kRelaxed);
    }
  }
  for (auto& count : activity.untracked) {
    count.store(0, kRelaxed);
  }
  observed_thread = ObservedThread();
}

// Coarse: a launch must not pay for a clock that is exact to the nanosecond.
int64_t nowNs() {
  timespec now{};
  if (::clock_gettime(CLOCK_MONOTONIC_COARSE, &now) != 0) {
    return -1;
  }
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

ActivitySlot* take(ActivitySlot& slot, int32_t owner, int32_t thread) {
  if (!slot.owner.compare_exchange_strong(owner, thread, std::memory_order_acq_rel)) {
    return nullptr;
  }
  slot.call.store(DriverCall::none, kRelaxed);  // the former owner may have been cancelled in
  slot.version.store((slot.version.load(kRelaxed) + 2) & ~1ULL, kRelaxed);  // its call
  return &slot;
}

// nullptr if as many threads that live have one. Apart, so that the way of every launch stays
// short.
[[gnu::noinline, gnu::cold]] ActivitySlot* claim() {
  const KeepErrno keep;
  const auto thread = static_cast<int32_t>(::syscall(SYS_gettid));
  for (ActivitySlot& slot : activity.slots) {
    const int32_t owner = slot.owner.load(kRelaxed);
    // A former thread had the same number: it has ended.
    if (owner == 0 || owner == thread) {
      if (ActivitySlot* const mine = take(slot, owner, thread)) {
        return mine;
      }
    }
  }
  const pid_t process = ::getpid();
  for (ActivitySlot& slot : activity.slots) {
    const int32_t owner = slot.owner.load(kRelaxed);
    if (::syscall(SYS_tgkill, process, owner, 0) != 0 && errno == ESRCH) {
      if (ActivitySlot* const mine = take(slot, owner, thread)) {
        return mine;
      }
    }
  }
  return nullptr;
}

[[gnu::noinline, gnu::cold]] ActivitySlot* newSlotOf(ObservedThread& thread) {
  if (thread.without_slot++ % kClaimEvery == 0) {
    thread.slot = claim();
  }
  return thread.slot;
}

[[gnu::noinline, gnu::cold]] bool clockFails() {
  disarm(ActivityTable::kClock);
  return false;
}

}  // namespace

bool arm() {
  uint32_t state = activity.state.load(std::memory_order_acquire);
  if (state == ActivityTable::kInert) {
    const KeepErrno keep;
    const bool off = isSet("REFT_DISABLE", '1') || isSet("REFT_INTERCEPT", '0');
    const uint32_t wanted = off ? ActivityTable::kOff : ActivityTable::kArmed;
    if (activity.state.compare_exchange_strong(state, wanted, std::memory_order_acq_rel)) {
      state = wanted;
      if (!off) {
        ::pthread_atfork(nullptr, nullptr, forgetParent);
      }
    }
  }
  return state == ActivityTable::kArmed;
}

void disarm(ActivityTable::Fault fault) {
  uint32_t none = ActivityTable::kNoFault;
  activity.fault.compare_exchange_strong(none, fault, kRelaxed);
  activity.state.store(ActivityTable::kDisarmed, std::memory_order_release);
}

[[gnu::noinline, gnu::cold]] void noteFailure(int result) {
  if (cuda::lastingError(result) == nullptr ||
      activity.state.load(kRelaxed) != ActivityTable::kArmed) {
    return;
  }
  int64_t none = 0;  // the time first: an error has one
  activity.error_ns.compare_exchange_strong(none, nowNs(), kRelaxed);
  int32_t zero = 0;
  activity.error.compare_exchange_strong(zero, result, std::memory_order_acq_rel);
}

bool enter(DriverCall call, CallKind kind, uint64_t object) {
  ObservedThread& thread = observed_thread;
  if (thread.inside || activity.state.load(kRelaxed) != ActivityTable::kArmed) {
    return false;
  }
  const int64_t now = nowNs();
  if (now < 0) {
    return clockFails();
  }
  thread.inside = true;
  if (kind == CallKind::kUnload) {
    activity.unloads.fetch_add(1, std::memory_order_acq_rel);
  }
  ActivitySlot* const slot = thread.slot != nullptr ? thread.slot : newSlotOf(thread);
  if (slot != nullptr) {
    beginCall(*slot, call, kind, object, now, activity.unloads.load(kRelaxed));
  } else {
    activity.untracked[static_cast<size_t>(kind)].fetch_add(1, kRelaxed);
  }
  return true;
}

}  // namespace reft::hooks
