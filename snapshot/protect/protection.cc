#include "snapshot/protect/protection.h"

#include <algorithm>

#include "intercept/base/error.h"
#include "snapshot/protect/parity.h"
#include "snapshot/protect/replicate.h"

namespace reft {

namespace {

const std::vector<const Protection*>& all() {
  static const Replicate none("none", 0);
  static const Replicate arc("arc", 1), arc2("arc:2", 2), arc3("arc:3", 3);
  static const Parity aec("aec");
  static const std::vector<const Protection*> list = {&none, &arc, &arc2, &arc3, &aec};
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

bool Protection::survives(const MemberNodes& nodes, const std::vector<bool>& lost) const {
  StoredShards stored = placement(nodes);
  for (uint32_t member = 0; member < stored.size(); ++member) {
    if (lost[member]) {
      stored[member].clear();
    }
  }
  const std::vector<std::vector<Recipe>> found = recipes(stored, paritySets(nodes));
  return std::none_of(found.begin(), found.end(), [](const auto& ways) { return ways.empty(); });
}

}  // namespace reft
