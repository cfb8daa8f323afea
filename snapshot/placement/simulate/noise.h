// Random numbers of a simulation.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstdint>

#include "intercept/base/hash.h"

namespace reft::simulate {

// Approximates a normal distribution, with the same values on every machine.
inline double normal(uint64_t seed) {
  double sum = -6;
  for (uint64_t i = 0; i < 12; ++i) {
    sum += static_cast<double>(splitmix64(seed + i * 0x632BE59BD9B4E019ull) >> 11) * 0x1.0p-53;
  }
  return sum;
}

}  // namespace reft::simulate
