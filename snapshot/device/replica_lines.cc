#include "snapshot/device/replica_lines.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "snapshot/vault/copy.h"

namespace reft {

std::vector<ReplicaLine> replicaLines(std::span<const uint64_t> region_bytes, uint64_t seed) {
  const uint64_t total = std::accumulate(region_bytes.begin(), region_bytes.end(), uint64_t{0});
  const uint64_t count =
      std::min<uint64_t>(ReplicaLine::kPerGroup,
                         (total + ReplicaLine::kMostBytes - 1) / uint64_t{ReplicaLine::kMostBytes});
  std::vector<ReplicaLine> lines;
  lines.reserve(count);
  std::minstd_rand draw(static_cast<uint32_t>(seed ^ (seed >> 32)));
  size_t region = 0;
  uint64_t before = 0;  // bytes of the regions before it
  const auto share = [&](uint64_t stratum) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(total) * stratum / count);
  };
  for (uint64_t stratum = 0; stratum < count; ++stratum) {
    const uint64_t from = share(stratum);
    const uint64_t at =
        from + static_cast<uint64_t>(static_cast<unsigned __int128>(draw() - draw.min()) *
                                     (share(stratum + 1) - from) / (draw.max() - draw.min() + 1));
    while (at - before >= region_bytes[region]) {
      before += region_bytes[region++];
    }
    const uint64_t offset = (at - before) / ReplicaLine::kMostBytes * ReplicaLine::kMostBytes;
    const uint64_t left = region_bytes[region] - offset;
    lines.push_back(
        {region, offset, static_cast<uint32_t>(std::min<uint64_t>(left, ReplicaLine::kMostBytes))});
  }
  return lines;
}

uint64_t replicaDigest(std::span<const ReplicaLine> lines, const std::byte* bytes, uint64_t seed) {
  uint64_t digest = seed;
  for (const ReplicaLine& line : lines) {
    digest = digest * 31 + sampleHash(bytes, line.bytes, 0, seed);
    bytes += ReplicaLine::kMostBytes;
  }
  return digest == 0 ? 1 : digest;
}

}  // namespace reft
