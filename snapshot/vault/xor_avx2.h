// XOR of whole blocks by AVX2.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>

namespace reft::avx2 {

inline constexpr size_t kXorBlock = 128;

#if defined(REFT_HAVE_AVX2)
// Whether the processor has AVX2.
inline bool xorAvailable() {
  static const bool found = __builtin_cpu_supports("avx2") != 0;
  return found;
}
// `bytes`: a multiple of kXorBlock.
void xorBlocks(std::byte* into, const std::byte* with, size_t bytes);
#else
inline bool xorAvailable() {
  return false;
}
inline void xorBlocks(std::byte*, const std::byte*, size_t) {}
#endif

}  // namespace reft::avx2
