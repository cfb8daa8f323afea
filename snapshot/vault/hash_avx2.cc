// Compiled with -mavx2 (snapshot/CMakeLists.txt). Includes no header of the standard library that
// has code: its inline functions would be compiled for AVX2 here, and the linker might keep this
// copy for all callers.
#include "snapshot/vault/hash_avx2.h"

#if defined(REFT_HAVE_AVX2)
#include <xxhash.h>

namespace reft::avx2 {

void update(void* state, const void* data, size_t bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
}
uint64_t hash(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace reft::avx2
#endif
