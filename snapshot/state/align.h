// Offsets, rounded up.
//
// Threads: values. Errors: none; a unit of 0 is the caller's fault.
#pragma once

#include <cstdint>

namespace reft {

constexpr uint64_t alignUp(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace reft
