// Compiled with -mavx2 (snapshot/CMakeLists.txt). Includes no header of the standard library that
// has code: its inline functions would be compiled for AVX2 here, and the linker might keep this
// copy for all callers.
#include "snapshot/vault/xor_avx2.h"

#if defined(REFT_HAVE_AVX2)
#include <immintrin.h>

namespace reft::avx2 {

void xorBlocks(std::byte* into, const std::byte* with, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kXorBlock) {
    for (size_t i = at; i < at + kXorBlock; i += sizeof(__m256i)) {
      auto* const to = reinterpret_cast<__m256i*>(into + i);
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(with + i));
      _mm256_storeu_si256(to, _mm256_xor_si256(_mm256_loadu_si256(to), b));
    }
  }
}

}  // namespace reft::avx2
#endif
