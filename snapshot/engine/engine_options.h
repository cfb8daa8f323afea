// Options of a SnapshotEngine.
//
// Threads: a plain value; see each callback. Errors: none.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "intercept/driver/cuda_api.h"
#include "intercept/record/device_marks.h"
#include "intercept/record/op_events.h"
#include "snapshot/cost/cadence.h"
#include "snapshot/placement/placer.h"

namespace reft {

struct EngineOptions {
  int rank = 0;
  uint64_t incarnation = 1;
  uint32_t copy_threads = 1;
  // As many once state is on a device, which copies faster than one thread hashes.
  uint32_t device_copy_threads = 1;
  PlacementPolicy policy = PlacementPolicy::kEager;  // all but kPaper
  // Ops of this process, by the engine's clock; outlives the engine. nullptr: none are known.
  OpEvents* events = nullptr;
  // Makes the thread that trains call check() when it is next between two ops; false: impossible.
  // Called from `reft-copy`. Without it the version counters are trusted as they are when the last
  // chunk has been copied.
  std::function<bool()> ask_check;
  bool verify_full = false;    // hash everything at capture instead of samples
  CadenceOptions cadence;      // which steps have a snapshot; capture() itself does not ask it
  uint32_t control_every = 0;  // steps with one control step; 0: none
  std::chrono::nanoseconds slot_wait{std::chrono::seconds(5)};
  uint64_t object_bytes = uint64_t{256} << 10;  // first capacity of a slot's object area
  // Longest wait of settle() and capture() for copies from a device. The device may be a whole step
  // behind the host, and a host that waits for it costs nothing, so only a device that hangs uses
  // it up.
  std::chrono::nanoseconds device_wait{std::chrono::minutes(5)};
  const CudaApi* cuda = nullptr;  // for regions on devices; nullptr: this process's
  // Marks on the stream that trains, for regions on a device; outlives the engine. nullptr: copies
  // begin at once, and the device's times stay unknown.
  DeviceMarks* device_marks = nullptr;
  // Training is unprotected when `ops_begun` moves and nothing was committed for so long; 0: never.
  std::chrono::nanoseconds alarm{0};
  std::function<uint64_t()> ops_begun;
  std::function<void(bool unprotected)> on_alarm;  // called from `reft-copy`
};

}  // namespace reft
