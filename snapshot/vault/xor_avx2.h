// XOR of whole blocks by AVX2.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>

#include "snapshot/vault/avx2.h"

namespace reft::avx2 {

inline constexpr size_t kXorBlock = 128;

#if defined(REFT_HAVE_AVX2)
// `bytes`: a multiple of kXorBlock.
void xorBlocks(std::byte* into, const std::byte* with, size_t bytes);
// As xorOf(). `into` is aligned to 32 bytes.
void xorAll(std::byte* into, const std::byte* const* with, size_t count, size_t bytes);
#else
inline void xorBlocks(std::byte*, const std::byte*, size_t) {}
inline void xorAll(std::byte*, const std::byte* const*, size_t, size_t) {}
#endif

}  // namespace reft::avx2
