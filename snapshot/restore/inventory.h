// What a vault has to offer to a restart, and how the nodes of a job tell each other.
//
// Each node publishes the inventory of its vaults as JSON; merging those of all nodes gives the
// inventory of the job. A group's ranks stand in it once, however many vaults share the group, and
// as runs [first, last, step]; so do its empty shards. A node's text, a job's text and the parsed
// job grow with the number of vaults, not with its square.
//
// Threads: re-entrant. Errors: parseInventories throws Corruption for text that is not an
// inventory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace reft {

class VaultReader;

// What all members of a sharding group have in common.
struct SharedGroup {
  std::string id;
  std::vector<int> ranks;            // ascending
  std::vector<uint32_t> empty = {};  // shards without a byte, ascending: no member stores them

  auto operator<=>(const SharedGroup&) const = default;
};

// A sharding group as one vault has it.
struct GroupSummary {
  std::shared_ptr<const SharedGroup> shared;  // parseInventories(): one object for all its vaults
  std::vector<uint32_t> shards;  // intact ones, ascending; no empty ones; D + k: its parity
  uint64_t digest = 0;           // of its contents, in part; 0: not recorded
  uint64_t layout = 0;           // groupLayouts() of snapshot/state/agreement.h
  std::vector<uint32_t> parity_set = {};  // its own, in its order; empty: none
};

struct SlotSummary {
  uint32_t slot = 0;
  int64_t step = 0;
  uint64_t incarnation = 0;
  uint64_t cut = 0;
  std::vector<GroupSummary> groups;
  std::string protection = "none";
  // A region that no other rank has, and for which no other rank's may stand in; "": none.
  std::string only_here = {};
  std::string indivisible = {};  // as only_here, of what is no part of a split tensor
  uint64_t splits = 0;           // digestOf() the split tensors; 0: there are none
};

// A vault, by what its writer has said of itself beside the slots.
struct VaultSummary {
  static constexpr uint64_t kUnknown = UINT64_MAX;

  int rank = 0;
  int node = 0;
  std::vector<SlotSummary> slots;
  // The attempt that had it last. Of a copy: it is known if the copy is of all that the vault had
  // when nothing wrote to it any more.
  uint64_t writer = kUnknown;
  int64_t resumed = -1;  // the step from which that attempt went on; -1: none
  bool is_copy = false;  // its node keeps it for another one
  int world = 0;         // ranks of the job that wrote it; 0: not said, taken for as many as now
  // When the attempt began that its steps come from, in nanoseconds of the system's clock; 0: not
  // known, or of an earlier attempt than its writer's, which goes on from elsewhere.
  uint64_t since = 0;

  // Whether the rank had this vault in the attempt that took a step, so that it was killed before
  // it sealed it if it holds it not. One that was made in place of a lost vault says nothing.
  bool wasThere(int64_t step, uint64_t incarnation) const;
};

// Sealed slots of one vault after hashing all of their bytes. A damaged shard is left out of its
// group, a slot with a damaged private part altogether; each damage is named in `faults`.
std::vector<SlotSummary> summarizeVerified(const VaultReader& reader,
                                           std::vector<std::string>& faults);
std::string inventoryJson(const std::vector<VaultSummary>& vaults);
std::vector<VaultSummary> parseInventories(const std::vector<std::string>& texts);

}  // namespace reft
