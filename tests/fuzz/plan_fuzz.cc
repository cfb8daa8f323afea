// Inventories of any text: parsing throws Corruption or gives a plan whose recipes only name vaults
// that are there, whatever the nodes wrote.
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>

#include "intercept/base/error.h"
#include "snapshot/restore/inventory.h"
#include "snapshot/restore/plan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (bytes < 2) {
    return 0;
  }
  const reft::JobShape shape{1 + data[0] % 8, 1 + data[1] % 4};
  try {
    const auto vaults =
        reft::parseInventories({std::string(reinterpret_cast<const char*>(data + 2), bytes - 2)});
    const auto decision = reft::planRestore(vaults, shape);
    if (!decision.plan) {
      return 0;
    }
    std::set<std::pair<std::string, uint32_t>> empty;  // shards that need no vault
    for (const reft::VaultSummary& vault : vaults) {
      for (const reft::SlotSummary& slot : vault.slots) {
        for (const reft::GroupSummary& group : slot.groups) {
          for (const uint32_t shard : group.shared->empty) {
            empty.emplace(group.shared->id, shard);
          }
        }
      }
    }
    for (const auto& [id, group] : decision.plan->groups) {
      for (uint32_t shard = 0; shard < group.recipes.size(); ++shard) {
        if (group.recipes[shard].empty() && !empty.contains({id, shard})) {
          std::abort();
        }
      }
      for (const auto& recipes : group.recipes) {
        for (const reft::Recipe& recipe : recipes) {
          for (const reft::StoredPart& part : recipe.parts) {
            const auto rank = static_cast<size_t>(group.ranks.at(part.member));
            if (decision.plan->vaults.at(rank).node < 0) {
              std::abort();
            }
          }
        }
      }
    }
    for (int rank = 0; rank < shape.world; ++rank) {
      reft::transfersOf(*decision.plan, rank);
    }
  } catch (const reft::Corruption&) {  // no inventory
  }
  return 0;
}
