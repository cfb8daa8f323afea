// Decides, on every rank alike, what a restarted job resumes from.
//
// Pure: the same inventories give the same plan everywhere, so no vote is needed. A step is taken
// only if every rank's own part and every shard of every sharding group is sealed somewhere under
// the same (step, incarnation), and if the sampled content hashes that the members of a group
// recorded agree (they differ when replicas diverged: silent data corruption), and if no message
// was under way between the ranks' program points (intercept/record/cut.h; with a vault lost, this
// is not known).
//
// Threads: re-entrant. Errors: parseInventories throws Corruption for text that is not an
// inventory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

class VaultReader;

struct GroupSummary {
  std::string id;
  std::vector<int> ranks;
  std::vector<uint32_t> shards;  // that this vault holds
  uint64_t digest = 0;
};

struct SlotSummary {
  uint32_t slot = 0;
  int64_t step = 0;
  uint64_t incarnation = 0;
  uint64_t cut = 0;
  std::vector<GroupSummary> groups;
};

struct VaultSummary {
  int rank = 0;
  int node = 0;
  std::vector<SlotSummary> slots;
};

struct RestorePlan {
  int64_t step = -1;
  uint64_t incarnation = 0;
  // Per rank: the node whose agent has its vault; -1: lost, to be rebuilt from `donor`.
  std::vector<int> node_of_rank;
  // Per lost rank: a member of the same groups whose small state stands in. Groups come back bit
  // for bit; random state, buffers and loop position are the donor's.
  std::map<int, int> donor;
  // Per group and shard: ranks whose vaults hold it, ascending.
  std::map<std::string, std::vector<std::vector<int>>> holders;
};

struct Agreement {
  std::optional<RestorePlan> plan;
  std::vector<std::string> rejected;  // newer steps that were passed over, each with the reason
};

// Sealed slots of one vault after hashing all of their bytes. A damaged shard is left out of its
// group, a slot with a damaged private part altogether; each damage is named in `faults`.
std::vector<SlotSummary> summarizeVerified(const VaultReader& reader,
                                           std::vector<std::string>& faults);
std::string inventoryJson(const std::vector<VaultSummary>& vaults);
std::vector<VaultSummary> parseInventories(const std::vector<std::string>& json_of_nodes);

Agreement agreeOnRestore(const std::vector<VaultSummary>& vaults, int world);

}  // namespace reft
