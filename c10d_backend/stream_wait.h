// Marks, around a wait for an op of a device or an op on the current stream itself, where that
// stream begins and ends to wait (intercept/record/device_marks.h).
//
// Threads: any. Errors: none: what cannot be marked is not.
#pragma once

#include <cstdint>

#include "intercept/record/device_marks.h"
#include "intercept/record/op_log.h"

namespace reft {

class StreamWait {
 public:
  // nullptr: nothing is marked.
  StreamWait(const OpLog* log, uint64_t ticket) noexcept;
  ~StreamWait();
  StreamWait(const StreamWait&) = delete;
  StreamWait& operator=(const StreamWait&) = delete;

 private:
  OpEvent mark_;
  DeviceStream stream_;
  bool marked_ = false;
};

}  // namespace reft
