#include "snapshot/protect/replicate.h"

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

}  // namespace reft
