// Copies bytes into a vault and computes the checksum of each chunk on the way.
//
// Copy and hash share one pass over the source: a block is hashed, which brings it into the cache,
// and then stored past the cache, so the training process keeps its working set. The source is not
// live memory: it would be read twice, by loads that may fault (live_reader.h).
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace reft {

class ChunkHasher {
 public:
  ChunkHasher();
  ~ChunkHasher();
  ChunkHasher(const ChunkHasher&) = delete;
  ChunkHasher& operator=(const ChunkHasher&) = delete;

  void reset();
  // dst and src do not overlap. `dst` 64-byte aligned is fastest.
  // `next`: what is read after this, maybe by another; it is fetched meanwhile, and may vanish.
  void copy(std::byte* dst, const std::byte* src, size_t bytes,
            std::span<const std::byte> next = {});
  // Hashes bytes that are in place.
  void hash(const std::byte* data, size_t bytes);
  // Writes zeros (padding between pieces) and hashes them.
  void zero(std::byte* dst, size_t bytes);
  // XXH3-64 of everything since reset().
  uint64_t digest() const;

 private:
  void* state_;
};

// The cache lines that are drawn from `bytes` of data: one in each of `samples` equal strata, so
// that no long stretch goes unseen. Equal arguments draw the same lines.
class LineSamples {
 public:
  LineSamples(uint64_t bytes, uint32_t samples, uint64_t seed);
  uint32_t count() const { return count_; }
  uint64_t next();  // offset of the next line

 private:
  uint64_t lines_, seed_, from_ = 0;
  uint32_t count_, at_ = 0;
};

// Hash of `samples` cache lines, or of everything if bytes ≤ 4096 or samples == 0. Equal (bytes,
// seed) select the same positions, so that capture, copy and other members agree.
uint64_t sampleHash(const std::byte* data, uint64_t bytes, uint32_t samples, uint64_t seed);

}  // namespace reft
