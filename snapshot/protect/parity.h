// Protection by parity: a rank stores its shard, and the XOR of one cell of the shard of each other
// member of its set (REFT, "aec"). A set of m members stores m / (m - 1) times its shards, and
// survives the loss of any one member.
//
// Sets are rows (ring.h), cut to at most kMostInAParitySet members, which are thus on nodes of
// their own unless one node has more than half of the group.
//
// Threads: immutable. Errors: none.
#pragma once

#include "snapshot/protect/protection.h"

namespace reft {

class Parity final : public Protection {
 public:
  explicit Parity(std::string_view name) : name_(name) {}

  std::string_view name() const override { return name_; }
  uint32_t losses(uint32_t members) const override { return members > 1 ? 1 : 0; }
  double storedShards(const MemberNodes& nodes) const override;
  bool hasParities() const override { return true; }
  ParitySets paritySets(const MemberNodes& nodes) const override;
  StoredShards placement(const MemberNodes& nodes) const override;
  std::vector<std::vector<Recipe>> recipes(const StoredShards& stored,
                                           const ParitySets& sets) const override;
  Survival survival(const MemberNodes& nodes) const override;

 private:
  const std::string_view name_;
};

}  // namespace reft
