#include "snapshot/state/agreement.h"

#include <algorithm>

#include "intercept/base/hash.h"
#include "intercept/record/cut.h"

namespace reft {

namespace {

uint64_t withText(uint64_t hash, std::string_view text) {
  return hashCombine(hashCombine(hash, text.size()), CutCounter::groupKey(text));
}

}  // namespace

std::vector<uint64_t> groupLayouts(const SnapshotTable& table) {
  std::vector<uint64_t> layouts;
  for (const GroupInfo& group : table.groups) {
    uint64_t hash = withText(withText(0, group.id), table.protection);
    hash = hashCombine(hash, group.ranks.size());
    for (const int rank : group.ranks) {
      hash = hashCombine(hash, static_cast<uint64_t>(rank));
    }
    hash = hashCombine(hash, group.sets.size());
    for (const std::vector<uint32_t>& set : group.sets) {
      hash = hashCombine(hash, set.size());
      for (const uint32_t member : set) {
        hash = hashCombine(hash, member);
      }
    }
    layouts.push_back(hash);
  }
  for (const RegionInfo& region : table.regions) {
    if (region.group < 0) {
      continue;
    }
    uint64_t& hash = layouts[static_cast<size_t>(region.group)];
    hash = withText(withText(hash, region.name), region.dtype);
    hash = hashCombine(hash, region.shape.size());
    for (const int64_t extent : region.shape) {
      hash = hashCombine(hash, static_cast<uint64_t>(extent));
    }
    hash = hashCombine(hashCombine(hash, region.bytes), region.row_bytes);
  }
  return layouts;
}

uint64_t agreementOf(const SnapshotTable& table, std::span<const uint64_t> layouts,
                     std::span<const uint64_t> digests) {
  uint64_t sum = 0;
  for (size_t g = 0; g < table.groups.size(); ++g) {
    const std::vector<int>& ranks = table.groups[g].ranks;
    const auto own = std::lower_bound(ranks.begin(), ranks.end(), table.rank) - ranks.begin();
    const uint64_t key = hashCombine(layouts[g], g < digests.size() ? digests[g] : 0);
    sum += CutCounter::collectiveTerm(key, static_cast<int>(own), static_cast<int>(ranks.size()));
  }
  return sum;
}

}  // namespace reft
