// Which bytes a parity covers (REFT, "aec"; the layout is that of SCR's XOR sets).
//
// Members of a sharding group form sets. The shard of each member, as the bytes of its ranges in
// table order, is cut into m - 1 cells for a set of m members. All cells of a set have one length;
// what a shard lacks at its end counts as zeros. Cell k of a shard belongs to the kth of the other
// members of the set. The parity that a member stores is the XOR of the cells that belong to it,
// one of the shard of each other member: one mth of a shard's own bytes and a little more. With the
// parities and shards of the others, the shard of one member comes back.
//
// Threads: immutable. Errors: the constructor throws InvalidArgument for a set that is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "snapshot/state/table.h"

namespace reft {

// Of a set. A larger one would need less memory, but all of its vaults but one for a way back.
inline constexpr size_t kMostInAParitySet = 16;

class ParityCells {
 public:
  // The set of `member`, of the group `group` of the table.
  ParityCells(const SnapshotTable& table, int32_t group, uint32_t member);
  // `set`: at least two members of a group of `members`, each once.
  ParityCells(const std::vector<RegionInfo>& regions, int32_t group, uint32_t members,
              std::vector<uint32_t> set);

  const std::vector<uint32_t>& set() const { return set_; }
  // Bytes of a cell and of a parity: a multiple of 64. 0: all shards of the set are empty.
  uint64_t bytes() const { return bytes_; }
  // Appends what [begin, end) of the cell of `shard` that belongs to `member` covers, in the order
  // of its bytes; what is left up to `end` are zeros. Both are of the set and differ.
  void ranges(uint32_t shard, uint32_t member, uint64_t begin, uint64_t end,
              std::vector<ShardRange>& into) const;
  // Calls fn(ranges) for each cell under [begin, end) of the parity of `member`.
  template <typename Fn>
  void eachUnder(uint32_t member, uint64_t begin, uint64_t end, Fn fn) const {
    std::vector<ShardRange> of_cell;
    for (const uint32_t shard : set_) {
      if (shard != member) {
        of_cell.clear();
        ranges(shard, member, begin, end, of_cell);
        fn(of_cell);
      }
    }
  }

 private:
  struct Shard {
    std::vector<ShardRange> ranges;
    std::vector<uint64_t> starts;  // of each range in the shard's bytes
    uint64_t bytes = 0;
  };
  size_t placeOf(uint32_t member) const;

  std::vector<uint32_t> set_;
  std::vector<Shard> shards_;  // of each member of the set
  uint64_t bytes_ = 0;
};

// The set that `member` is in; nullptr: none of two or more.
const std::vector<uint32_t>* paritySetOf(const GroupInfo& group, uint32_t member);

}  // namespace reft
