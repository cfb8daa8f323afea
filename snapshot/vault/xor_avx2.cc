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

void xorAll(std::byte* into, const std::byte* const* with, size_t count, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kXorBlock) {
    const auto* first = reinterpret_cast<const __m256i*>(with[0] + at);
    __m256i a = _mm256_loadu_si256(first), b = _mm256_loadu_si256(first + 1);
    __m256i c = _mm256_loadu_si256(first + 2), d = _mm256_loadu_si256(first + 3);
    for (size_t k = 1; k < count; ++k) {
      const auto* next = reinterpret_cast<const __m256i*>(with[k] + at);
      a = _mm256_xor_si256(a, _mm256_loadu_si256(next));
      b = _mm256_xor_si256(b, _mm256_loadu_si256(next + 1));
      c = _mm256_xor_si256(c, _mm256_loadu_si256(next + 2));
      d = _mm256_xor_si256(d, _mm256_loadu_si256(next + 3));
    }
    auto* const to = reinterpret_cast<__m256i*>(into + at);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
  _mm_sfence();
}

}  // namespace reft::avx2
#endif
