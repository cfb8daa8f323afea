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
#else
inline void xorBlocks(std::byte*, const std::byte*, size_t) {}
#endif

}  // namespace reft::avx2
