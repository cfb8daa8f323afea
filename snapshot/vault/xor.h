// XOR of bytes, for parities.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <span>

namespace reft {

// into[i] ^= with[i]. The two do not overlap.
// `next`: what is read after this, maybe by another; it is fetched meanwhile, and may vanish.
void xorInto(std::byte* into, const std::byte* with, size_t bytes,
             std::span<const std::byte> next = {});

}  // namespace reft
