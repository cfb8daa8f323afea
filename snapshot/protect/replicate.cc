#include "snapshot/protect/replicate.h"

#include <algorithm>
#include <set>

namespace reft {

uint32_t Replicate::stored(uint32_t members) const {
  return std::min(copies_ + 1, members);
}

StoredShards Replicate::placement(const MemberNodes& nodes) const {
  const std::vector<uint32_t> ring = ringOf(nodes);
  const auto members = static_cast<uint32_t>(ring.size());
  StoredShards shards(members);
  for (uint32_t at = 0; at < members; ++at) {
    for (uint32_t k = 0; k < stored(members); ++k) {
      shards[ring[at]].push_back(ring[(at + k) % members]);
    }
  }
  return shards;
}

std::vector<std::vector<Recipe>> Replicate::recipes(const StoredShards& stored,
                                                    const ParitySets& /*sets*/) const {
  std::vector<std::vector<Recipe>> found(stored.size());
  for (uint32_t member = 0; member < stored.size(); ++member) {
    for (const uint32_t shard : stored[member]) {
      if (shard < found.size()) {
        found[shard].push_back({Decode::kCopy, {{member, shard}}});
      }
    }
  }
  return found;
}

// A shard is lost with the nodes of all that hold it.
Survival Replicate::survival(const MemberNodes& nodes) const {
  StoredShards holders(nodes.size());
  const StoredShards stored = placement(nodes);
  for (uint32_t member = 0; member < stored.size(); ++member) {
    for (const uint32_t shard : stored[member]) {
      holders[shard].push_back(member);
    }
  }
  Survival found;
  for (const std::vector<uint32_t>& members : holders) {
    std::set<int> on;
    for (const uint32_t member : members) {
      on.insert(nodes[member]);
    }
    const auto survived = static_cast<uint32_t>(on.size() - 1);
    if (found.weakest.empty() || survived < found.nodes) {
      found = {survived, members};
    }
  }
  return found;
}

}  // namespace reft
