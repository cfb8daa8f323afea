// Inventories of a job of replicas, for the tests of restore.
//
// Threads: free functions. Errors: none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "snapshot/restore/inventory.h"

namespace reft {

inline constexpr uint64_t kInc = 5;

// A job of one sharding group over all ranks; `copies` further shards per rank.
inline std::vector<VaultSummary> replicas(int world, int64_t step, uint32_t copies,
                                          uint64_t incarnation = kInc) {
  std::vector<VaultSummary> vaults;
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.push_back(rank);
  }
  const auto info = std::make_shared<const SharedGroup>(SharedGroup{"g", ranks});
  for (int rank = 0; rank < world; ++rank) {
    GroupSummary group{info, {}, 99};
    for (uint32_t k = 0; k <= copies; ++k) {
      group.shards.push_back((static_cast<uint32_t>(rank) + k) % static_cast<uint32_t>(world));
    }
    std::sort(group.shards.begin(), group.shards.end());
    vaults.push_back({rank, rank / 2, {{0, step, incarnation, 0, {group}}}});
  }
  return vaults;
}

}  // namespace reft
