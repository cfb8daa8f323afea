// Protection by whole copies: a rank stores the shards of the next members of its group, too.
//
// `none` stores no copies: it survives killed processes, whose vaults the agent keeps. `arc` stores
// one, `arc:k` stores k of them (REFT, "arc"): they survive every loss that leaves one of any k + 1
// successive members of the ring.
//
// Threads: immutable. Errors: none.
#pragma once

#include "snapshot/protect/protection.h"

namespace reft {

class Replicate final : public Protection {
 public:
  Replicate(std::string_view name, uint32_t copies) : name_(name), copies_(copies) {}

  std::string_view name() const override { return name_; }
  uint32_t losses(uint32_t members) const override { return stored(members) - 1; }
  double storedShards(const MemberNodes& nodes) const override {
    return stored(static_cast<uint32_t>(nodes.size()));
  }
  StoredShards placement(const MemberNodes& nodes) const override;
  std::vector<std::vector<Recipe>> recipes(const StoredShards& stored,
                                           const ParitySets& sets) const override;
  Survival survival(const MemberNodes& nodes) const override;

 private:
  uint32_t stored(uint32_t members) const;

  const std::string_view name_;
  const uint32_t copies_;
};

}  // namespace reft
