// What the engine captures at a program point, and what came of it.
//
// Threads: plain values; see each interface. Errors: none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "intercept/record/device_marks.h"

namespace reft {

// Evidence that regions were written or moved, in table order. Copy threads call it: no lock, no
// GIL.
class VersionReader {
 public:
  virtual ~VersionReader() = default;
  virtual uint64_t version(size_t region) const noexcept = 0;
  // Whether the memory of a region is where it was at the capture, and as large.
  virtual bool stands(size_t /*region*/) const noexcept { return true; }
};

// Bytes of the objects that still lie on a device.
struct ObjectPart {
  const void* from = nullptr;
  int device = 0;
  uint64_t offset = 0;  // in the objects
  uint64_t bytes = 0;
};

struct CaptureInput {
  int64_t step = 0;
  std::span<const void* const> addresses;  // one per region of the table
  std::shared_ptr<const VersionReader> versions;
  std::string_view objects;
  // Parts that are copied into the objects before the seal. Their devices are among those of
  // `streams`. Work that is enqueued on `streams` and `writers` after capture() runs behind the
  // copy.
  std::span<const ObjectPart> parts = {};
  // Further streams of the same devices; copies run behind the work enqueued on them so far.
  std::span<const DeviceStream> writers = {};
  uint64_t cut = 0;       // CutCounter::value() at the program point
  bool checkable = true;  // `ask_check` reaches the thread that trains
  bool gated = true;      // gate() runs before the state is written again
  // Runs its argument while no other thread moves memory; empty: none does at any time.
  std::function<void(const std::function<void()>&)> still = {};
  std::span<const int> devices = {};  // of each address, -1: the host; empty: all on the host
  std::span<const DeviceStream> streams = {};  // that train, one for each device in `devices`

  bool onDevice() const {
    return std::any_of(devices.begin(), devices.end(), [](int device) { return device >= 0; });
  }
};

enum class CaptureResult { kTaken, kNoSlot, kNoTable, kUnderWay, kFailed };

}  // namespace reft
