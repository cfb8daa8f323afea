#include "snapshot/restore/decoding.h"

#include <algorithm>
#include <cstring>

#include "intercept/base/error.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr uint64_t kBlock = uint64_t{64} << 10;  // stays in the cache

}  // namespace

Decoding::Decoding(const SnapshotTable& table, const Move& move)
    : move_(move),
      members_(
          static_cast<uint32_t>(table.groups.at(static_cast<size_t>(move.group)).ranks.size())),
      cells_(table, move.group, move.shard) {
  for (size_t i = 0; i < move.sources.size(); ++i) {
    parities_.push_back(hostBuffer(cells_.bytes()));
  }
}

void Decoding::run(const LiveWriter& live) {
  std::vector<ShardRange> ranges;
  for (size_t i = 0; i < parities_.size(); ++i) {
    const uint32_t keeper = memberAt(i);
    for (uint64_t begin = 0; begin < cells_.bytes(); begin += kBlock) {
      const uint64_t end = std::min(begin + kBlock, cells_.bytes());
      for (const uint32_t other : cells_.set()) {
        if (other == keeper || other == move_.shard) {
          continue;
        }
        ranges.clear();
        cells_.ranges(other, keeper, begin, end, ranges);
        std::byte* sum = parity(i) + begin;
        for (const ShardRange& range : ranges) {
          const uint64_t bytes = range.end - range.begin;
          xorInto(sum, live.hostAddress(range), bytes);
          sum += bytes;
        }
      }
      ranges.clear();
      cells_.ranges(move_.shard, keeper, begin, end, ranges);
      live.scatter(ranges, parity(i) + begin);
      uint64_t filled = begin;
      for (const ShardRange& range : ranges) {
        filled += range.end - range.begin;
      }
      if (std::any_of(parity(i) + filled, parity(i) + end,
                      [](std::byte byte) { return byte != std::byte{}; })) {
        throw Corruption("shard " + std::to_string(move_.shard) +
                         " does not come out of the parities of the others: these, and the shards "
                         "of the others, are not of one state");
      }
    }
  }
}

}  // namespace reft
