// The hash of the vault: XXH3-64. Every checksum in a vault is a hashBytes() or its streamed form,
// ChunkHasher (copy.h).
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reft {

// XXH3-64, by AVX2 where the processor has it (hash_avx2.h).
uint64_t hashBytes(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace reft
