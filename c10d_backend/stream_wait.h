// Marks the begin and the end of a stream's wait (intercept/record/device_marks.h), around a wait
// for an op of a device, or around an op on the current stream itself.
//
// Threads: any. Errors: none; a mark that cannot be made is missing.
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
