#include "snapshot/vault/hash.h"

#include <xxhash.h>

#include "snapshot/vault/hash_avx2.h"

namespace reft {

namespace {

constexpr size_t kWorthAvx2 = 4096;  // below this, the call costs what AVX2 saves

}  // namespace

uint64_t hashBytes(const void* data, size_t bytes, uint64_t seed) {
  return bytes > kWorthAvx2 && avx2::available() ? avx2::hash(data, bytes, seed)
                                                 : XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace reft
