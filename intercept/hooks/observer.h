// What surrounds an observed driver call: the thread's slot, its counters, and the switches.
//
// Inert until arm(), which the first CUDA function that is looked up, or called, causes. A call
// that the driver makes inside another one is not observed. If something is wrong here, disarm()
// turns everything off for good, and calls pass.
//
// Threads: any. A thread claims a slot in its first call and loses it to others after its end.
// Errors:  none. errno stays as it is.
#pragma once

#include "intercept/record/activity_table.h"

namespace reft::hooks {

extern ActivityTable activity;

// Reads the settings at the first call. Whether calls are observed.
bool arm();
void disarm(ActivityTable::Fault fault);

struct ObservedThread {
  ActivitySlot* slot = nullptr;
  uint32_t without_slot = 0;  // calls
  bool inside = false;        // a call: what the driver calls meanwhile is its own affair
};
extern constinit thread_local ObservedThread observed_thread;

// Whether the caller has to call leave() after the real call.
bool enter(DriverCall call, CallKind kind, uint64_t object);
inline void leave() {
  ObservedThread& thread = observed_thread;
  // The child of a fork inside the call has no slot.
  thread.inside = false;
  if (thread.slot != nullptr) {
    endCall(*thread.slot);
  }
}

// Keeps the first error after which the device is lost.
void noteFailure(int result);
inline int noted(int result) {
  if (result != 0) [[unlikely]] {
    noteFailure(result);
  }
  return result;
}

class Observed {
 public:
  Observed(DriverCall call, CallKind kind, const void* object)
      : entered_(enter(call, kind, reinterpret_cast<uint64_t>(object))) {}
  ~Observed() {
    if (entered_) {
      leave();
    }
  }
  Observed(const Observed&) = delete;
  Observed& operator=(const Observed&) = delete;

 private:
  const bool entered_;
};

}  // namespace reft::hooks
