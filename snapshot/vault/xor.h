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

// into[i] = with[0][i] ^ with[1][i] ^ …, all read at once and stored past the cache. `into` may be
// one of them, and overlaps no other.
void xorOf(std::byte* into, std::span<const std::byte* const> with, size_t bytes);

}  // namespace reft
