#include "snapshot/state/parity_cells.h"

#include <algorithm>
#include <utility>

#include "intercept/base/error.h"
#include "snapshot/state/align.h"

namespace reft {

namespace {

constexpr uint64_t kCellAlign = 64;

std::vector<uint32_t> setOf(const SnapshotTable& table, int32_t group, uint32_t member) {
  const std::vector<uint32_t>* const set =
      paritySetOf(table.groups.at(static_cast<size_t>(group)), member);
  return set == nullptr ? std::vector<uint32_t>{member} : *set;
}

uint32_t membersOf(const SnapshotTable& table, int32_t group) {
  return static_cast<uint32_t>(table.groups.at(static_cast<size_t>(group)).ranks.size());
}

}  // namespace

const std::vector<uint32_t>* paritySetOf(const GroupInfo& group, uint32_t member) {
  const auto at = std::ranges::find_if(group.sets, [&](const std::vector<uint32_t>& set) {
    return set.size() > 1 && std::ranges::find(set, member) != set.end();
  });
  return at == group.sets.end() ? nullptr : &*at;
}

ParityCells::ParityCells(const SnapshotTable& table, int32_t group, uint32_t member)
    : ParityCells(table.regions, group, membersOf(table, group), setOf(table, group, member)) {}

ParityCells::ParityCells(const std::vector<RegionInfo>& regions, int32_t group, uint32_t members,
                         std::vector<uint32_t> set)
    : set_(std::move(set)) {
  std::vector<uint32_t> sorted = set_;
  std::ranges::sort(sorted);
  if (sorted.size() < 2 || sorted.back() >= members ||
      std::ranges::adjacent_find(sorted) != sorted.end()) {
    throw InvalidArgument("parity set", "of " + std::to_string(sorted.size()) + " members",
                          "two or more of the group's " + std::to_string(members) + ", each once");
  }
  for (const uint32_t member : set_) {
    Shard& shard = shards_.emplace_back();
    shard.ranges = shardRanges(regions, group, member, members);
    for (const ShardRange& range : shard.ranges) {
      shard.starts.push_back(shard.bytes);
      shard.bytes += range.end - range.begin;
    }
    const uint64_t cells = set_.size() - 1;
    bytes_ = std::max(bytes_, alignUp((shard.bytes + cells - 1) / cells, kCellAlign));
  }
}

size_t ParityCells::placeOf(uint32_t member) const {
  return static_cast<size_t>(std::ranges::find(set_, member) - set_.begin());
}

void ParityCells::ranges(uint32_t shard, uint32_t member, uint64_t begin, uint64_t end,
                         std::vector<ShardRange>& into) const {
  const size_t of = placeOf(shard), keeper = placeOf(member);
  const Shard& from = shards_.at(of);
  const uint64_t cell = (keeper < of ? keeper : keeper - 1) * bytes_;
  const uint64_t last = std::min(from.bytes, cell + end);
  uint64_t at = cell + begin;
  if (at >= last) {
    return;
  }
  auto range = static_cast<size_t>(std::ranges::upper_bound(from.starts, at) - from.starts.begin());
  for (--range; at < last; ++range) {
    const ShardRange& whole = from.ranges[range];
    const uint64_t skipped = at - from.starts[range];
    const uint64_t bytes = std::min(whole.end - whole.begin - skipped, last - at);
    into.push_back({whole.region, whole.begin + skipped, whole.begin + skipped + bytes});
    at += bytes;
  }
}

}  // namespace reft
