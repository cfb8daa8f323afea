// What this process does on its CUDA devices, as the preloaded library (intercept/preload/) has
// counted it: calls of each kind, the newest kernel, and the threads that are inside a driver call.
//
// readDeviceActivity() reads memory only. It makes no CUDA call, so a device or a driver that hangs
// does not block it. nameOfKernel() does make one (cuFuncGetName): call it where it may block.
//
// Threads: any. Errors: none; a process without the library has `state` kAbsent and zeros.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "intercept/driver/device_error.h"
#include "intercept/record/activity_table.h"

namespace reft {

struct DeviceActivity {
  enum State {
    kAbsent,    // the library is not preloaded
    kForeign,   // it is, but is of another version of reft
    kInert,     // the process has not looked up a CUDA function
    kArmed,     // calls are observed
    kOff,       // REFT_INTERCEPT=0 or REFT_DISABLE=1
    kDisarmed,  // the library has stopped after a fault of its own: the numbers are old
  };
  struct Call {
    pid_t thread = 0;
    DriverCall call = DriverCall::none;
    uint64_t object = 0;   // kernel, graph, stream or event; 0: none
    int64_t since_ns = 0;  // CLOCK_MONOTONIC; late by up to 10 ms
    uint64_t number = 0;   // differs from that of every other call of the thread
  };
  struct Launch {
    pid_t thread = 0;
    DriverCall call = DriverCall::none;
    uint64_t kernel = 0;  // CUfunction or CUkernel
    int64_t at_ns = 0;    // CLOCK_MONOTONIC; late by up to 10 ms
    uint64_t unloads = 0;
  };

  uint64_t count(CallKind kind) const { return counts[static_cast<size_t>(kind)]; }

  State state = kAbsent;
  std::array<uint64_t, kCallKinds> counts{};  // calls begun
  // The newest of a thread with a slot; if several have launched within 10 ms, of one of them.
  std::optional<Launch> launch;
  std::vector<Call> in_call;  // the oldest first
  DeviceError error;          // the first that lasts, of any call that is observed
  // Calls of threads without a slot, which `launch` and `in_call` leave out.
  uint64_t untracked = 0;
  uint64_t hooked = 0;    // functions whose calls are observed, without those that programs link
  uint64_t unhooked = 0;  // functions whose calls are not observed
};

DeviceActivity readDeviceActivity();
// The same, from a table of the caller's; nullptr: none.
DeviceActivity readDeviceActivity(const ActivityTable* table);

// Mangled name of a kernel. nullopt if the driver cannot tell, and if something was unloaded since
// the launch, since the handle may then be dead.
std::optional<std::string> nameOfKernel(const DeviceActivity::Launch& launch);

// "launch", "graph launch", "copy", …
const char* wordOf(CallKind kind);

}  // namespace reft
