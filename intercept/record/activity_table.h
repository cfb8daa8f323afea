// What the threads of this process do in CUDA's driver: the memory that the preloaded library
// writes and that device_activity.h reads.
//
// A thread owns a slot from its first call on: only it writes there, with plain stores, so that a
// launch costs no locked instruction. Counters stay when another thread takes the slot of one that
// has ended: the sum over all slots is that of the process. Threads that find no slot share
// `untracked`.
//
// The library and its reader are two files, which an update may leave of different age: a reader
// checks `layout` before it looks at anything else.
//
// Order in a slot: `version` is odd while the owner rewrites the fields of a new call. `call` is
// set with them, and cleared alone when the call returns. A reader takes `version`, the fields, and
// `version` again.
//
// Threads: as above. Errors: none. No part of this header needs code of the C++ library.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "intercept/record/driver_calls.h"

namespace reft {

struct alignas(64) ActivitySlot {
  std::atomic<int32_t> owner{0};  // thread id; 0: free
  std::atomic<DriverCall> call{DriverCall::none};
  std::atomic<DriverCall> launch_call{DriverCall::none};
  std::atomic<uint64_t> version{0};
  std::atomic<int64_t> since_ns{0};   // CLOCK_MONOTONIC, late by up to one tick of the kernel
  std::atomic<uint64_t> object{0};    // of the call
  std::atomic<uint64_t> kernel{0};    // of the newest launch
  std::atomic<int64_t> launch_ns{0};  // 0: this slot has seen no launch
  std::atomic<uint64_t> unloads{0};   // ActivityTable::unloads before that launch
  std::atomic<uint64_t> counts[kCallKinds]{};
};

// Differs between any two tables whose bytes mean different things.
constexpr uint64_t layoutOfActivity(size_t slots) {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  add(2);  // of the table's other fields
  add(sizeof(ActivitySlot));
  add(slots);
  add(kCallKinds);
  for (size_t call = 0; call < kDriverCalls; ++call) {
    for (const char* name = nameOf(static_cast<DriverCall>(call)); *name != 0; ++name) {
      add(static_cast<unsigned char>(*name));
    }
    add(0);
  }
  return hash;
}

struct ActivityTable {
  static constexpr size_t kSlots = 128;

  enum State : uint32_t {
    kInert,     // no CUDA function was looked up yet
    kArmed,     // calls are observed
    kOff,       // by a setting
    kDisarmed,  // after a fault of its own; calls pass
  };
  enum Fault : uint32_t { kNoFault, kClock };

  static constexpr uint64_t kLayout = layoutOfActivity(kSlots);
  std::atomic<uint64_t> layout{0};  // kLayout of the library that wrote it
  std::atomic<uint32_t> state{kInert};
  std::atomic<uint32_t> fault{kNoFault};
  std::atomic<uint64_t> unloads{0};  // counted before the real call
  std::atomic<uint64_t> hooked{0};   // functions that have a hook
  // Functions handed out as they are: of an unknown version, or because no hook was free.
  std::atomic<uint64_t> unhooked{0};
  std::atomic<uint64_t> untracked[kCallKinds]{};
  std::atomic<int32_t> error{0};     // the first after which the device is lost; 0: none
  std::atomic<int64_t> error_ns{0};  // CLOCK_MONOTONIC
  ActivitySlot slots[kSlots];
};

// Owner of the slot only. A launch replaces `kernel`; other kinds keep it.
inline void beginCall(ActivitySlot& slot, DriverCall call, CallKind kind, uint64_t object,
                      int64_t now_ns, uint64_t unloads) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const uint64_t version = slot.version.load(kRelaxed);
  slot.version.store(version + 1, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.since_ns.store(now_ns, kRelaxed);
  slot.object.store(object, kRelaxed);
  slot.call.store(call, kRelaxed);
  if (kind == CallKind::kLaunch) {
    slot.kernel.store(object, kRelaxed);
    slot.launch_ns.store(now_ns, kRelaxed);
    slot.launch_call.store(call, kRelaxed);
    slot.unloads.store(unloads, kRelaxed);
  }
  auto& count = slot.counts[static_cast<size_t>(kind)];
  count.store(count.load(kRelaxed) + 1, kRelaxed);
  slot.version.store(version + 2, std::memory_order_release);
}
inline void endCall(ActivitySlot& slot) {
  slot.call.store(DriverCall::none, std::memory_order_release);
}

}  // namespace reft
