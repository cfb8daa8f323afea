// Which cache lines of a sharding group's state are compared between its replicas, where the state
// lies on devices.
//
// Replicas hold equal bytes, and a snapshot takes another shard from each, so a restore would mix
// replicas that differ. On the host a digest over samples is taken at the program point. A device
// cannot be read there without waiting for it, so a few lines travel with each snapshot, and their
// digest is kept instead. Each step has other lines, the same ones on all replicas: replicas that
// diverged differ nearly everywhere and are found at once; a single different tensor is found when
// a line falls into it.
//
// Threads: pure functions. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace reft {

struct ReplicaLine {
  static constexpr uint32_t kMostBytes = 64;
  static constexpr uint32_t kPerGroup = 16;
  static constexpr size_t kGroupBytes =
      size_t{kPerGroup} * kMostBytes;  // room for all lines of a group

  size_t region = 0;    // position among the group's regions
  uint64_t offset = 0;  // in the region
  uint32_t bytes = 0;
};

// Of regions of so many bytes each: one line in each of equal strata of all their bytes. Fewer
// where there are few bytes.
std::vector<ReplicaLine> replicaLines(std::span<const uint64_t> region_bytes, uint64_t seed);

// Of the lines' bytes, one behind the other, each at a multiple of kMostBytes. Never 0, which
// stands for "not recorded".
uint64_t replicaDigest(std::span<const ReplicaLine> lines, const std::byte* bytes, uint64_t seed);

}  // namespace reft
