// The tensor table of a snapshot: the regions of a rank, which of them its sharding groups share,
// and where their pieces lie in the payload. Typed and without code: a reader never unpickles.
//
// A sharding group of D members cuts the concatenation of its regions into D shards, one per
// member. Cuts fall on rows of dim 0, so every piece is a box in global coordinates and shards
// differ by at most one row. What a rank holds of other members' shards is copied from its own
// memory. A group of D members whose protection stores parities numbers that of member k as part
// D + k (parity_cells.h).
//
// A rank's own regions may be its rows of tensors that all ranks have in parts (split.h).
//
// Threads: values. Errors: fromJson throws Corruption; buildTable throws InvalidArgument.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "snapshot/state/split.h"

namespace reft {

struct RegionInfo {
  std::string name;   // unique in the rank, equal on all members of its group
  std::string dtype;  // "float32", …
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  uint64_t row_bytes = 0;  // unit of cuts; == bytes: the region is not cut
  int32_t group = -1;      // index into groups; -1: private to this rank
  bool early = false;      // copied before the optimizer step returns
  // In items, one per dimension; empty: dim 0 outermost and no gaps.
  std::vector<int64_t> strides = {};
  bool replaceable = false;  // if the rank is lost, another rank's may stand in: a buffer
};

struct GroupInfo {
  std::string id;          // equal on all members, unique in the job
  std::vector<int> ranks;  // global ranks, ascending
  // Members whose shards have parities in common, equal on all members; empty: there are none.
  std::vector<std::vector<uint32_t>> sets = {};
};

// A contiguous range of one region's bytes, in this rank's payload.
struct Piece {
  uint32_t region = 0;
  uint32_t shard = 0;  // which member's shard it belongs to; private regions: 0
  uint64_t begin = 0, end = 0;
  uint64_t payload_offset = 0;
};

// Bytes [begin, end) of the parity that the rank stores of a group.
struct ParityPiece {
  uint32_t group = 0;
  uint64_t begin = 0, end = 0;
  uint64_t payload_offset = 0;
};

struct SnapshotTable {
  int rank = 0;
  int world = 1;
  std::string protection = "none";
  std::vector<RegionInfo> regions;
  std::vector<GroupInfo> groups;
  std::vector<SplitTensor> splits;  // that all ranks have in parts
  std::vector<Piece> pieces;        // by ascending payload_offset; early regions first
  // By ascending payload_offset, in chunks of their own; those that cover early regions are early.
  std::vector<ParityPiece> parities;
  uint64_t early_bytes = 0;  // payload before this offset is early (multiple of chunk_bytes)
  uint64_t payload_bytes = 0;
  uint64_t chunk_bytes = 0;

  std::string toJson() const;
  static SnapshotTable fromJson(std::string_view text);  // validates everything
  // Shards of group `g` that this rank's payload holds, ascending; no empty ones.
  std::vector<uint32_t> shardsOf(int32_t g) const;
  // The number of the rank among the members of group `g`.
  uint32_t memberOf(int32_t g) const;
  // The part that is its parity of group `g`: D + its number.
  uint32_t parityPart(int32_t g) const;
  std::set<std::string_view> splitNames() const;
  // Whether this rank's payload holds the whole parity of group `g`.
  bool holdsParityOf(int32_t g) const;
  // Shards of group `g` without a byte (fewer rows than members), ascending; equal on all members.
  std::vector<uint32_t> emptyShardsOf(int32_t g) const;
};

// Range [begin, end) of the shard `index` of `members` in each of `regions` (of one group, in table
// order).
struct ShardRange {
  uint32_t region;
  uint64_t begin, end;
};
std::vector<ShardRange> shardRanges(const std::vector<RegionInfo>& regions, int32_t group,
                                    uint32_t index, uint32_t members);

// Fills in pieces, parities and payload sizes. `held`: per group, the shards that the rank holds,
// in the order of its payload, and its parity if it stores that; empty: its own shard of each
// group.
SnapshotTable buildTable(int rank, int world, std::vector<RegionInfo> regions,
                         std::vector<GroupInfo> groups, const std::string& protection,
                         const std::vector<std::vector<uint32_t>>& held, uint64_t chunk_bytes,
                         std::vector<SplitTensor> splits = {});

}  // namespace reft
