// Asks the current stream of the calling thread to say when it reaches an op, and when it has
// passed one (intercept/record/device_ops.h). The op's record notes what was asked.
//
// Threads: any, with the device's context. Errors: none; a mark that cannot be made is missing.
#pragma once

#include <cstdint>

#include "intercept/record/op_log.h"

namespace reft {

void sayWhenReached(OpLog& log, uint64_t ticket) noexcept;
void sayWhenPassed(OpLog& log, uint64_t ticket) noexcept;

}  // namespace reft
