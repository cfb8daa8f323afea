#include "snapshot/protect/replicate.h"

#include <set>

namespace reft {

std::vector<std::vector<Recipe>> Replicate::recipes(const StoredShards& stored) const {
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
