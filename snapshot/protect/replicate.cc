#include "snapshot/protect/replicate.h"

#include <algorithm>

namespace reft {

std::vector<Recipe> Replicate::recipes(uint32_t shard, const StoredShards& stored) const {
  std::vector<Recipe> found;
  for (uint32_t member = 0; member < stored.size(); ++member) {
    if (std::binary_search(stored[member].begin(), stored[member].end(), shard)) {
      found.push_back({Decode::kCopy, {{member, shard}}});
    }
  }
  return found;
}

}  // namespace reft
