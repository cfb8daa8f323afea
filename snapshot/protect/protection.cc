#include "snapshot/protect/protection.h"

#include <algorithm>

#include "intercept/base/error.h"
#include "snapshot/protect/replicate.h"

namespace reft {

namespace {

const std::vector<const Protection*>& all() {
  static const Replicate none("none", 0);
  static const Replicate arc("arc", 1);
  static const std::vector<const Protection*> list = {&none, &arc};
  return list;
}

}  // namespace

const Protection& Protection::named(std::string_view name) {
  std::string allowed;
  for (const Protection* protection : all()) {
    if (protection->name() == name) {
      return *protection;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(protection->name());
  }
  throw InvalidArgument("protection", "'" + std::string(name) + "'", allowed);
}

std::vector<uint32_t> Protection::storedBy(uint32_t member, uint32_t members) const {
  std::vector<uint32_t> shards;
  for (uint32_t k = 0; k <= std::min(furtherShards(), members - 1); ++k) {
    shards.push_back((member + k) % members);
  }
  std::sort(shards.begin(), shards.end());
  return shards;
}

bool Protection::survives(const std::vector<bool>& lost) const {
  const auto members = static_cast<uint32_t>(lost.size());
  StoredShards stored(members);
  for (uint32_t member = 0; member < members; ++member) {
    if (!lost[member]) {
      stored[member] = storedBy(member, members);
    }
  }
  const std::vector<std::vector<Recipe>> found = recipes(stored);
  return std::none_of(found.begin(), found.end(), [](const auto& ways) { return ways.empty(); });
}

}  // namespace reft
