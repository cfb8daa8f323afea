// XOR of bytes, for parities.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>

namespace reft {

// into[i] ^= with[i]. The two do not overlap.
void xorInto(std::byte* into, const std::byte* with, size_t bytes);

}  // namespace reft
