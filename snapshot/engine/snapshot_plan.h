// A snapshot table with what is derived from it once: where chunks begin, how many samples each
// piece has, which regions a sharding group has, what its parities cover.
//
// Threads: immutable. Errors: none besides std::bad_alloc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "snapshot/state/parity_cells.h"
#include "snapshot/state/table.h"

namespace reft {

struct SnapshotPlan {
  static constexpr uint32_t kNoParity = UINT32_MAX;

  // `anew`: votes ask all ranks to plan (snapshot/commit/plan_rounds.h).
  explicit SnapshotPlan(SnapshotTable of, bool anew = false);

  // Bytes of a chunk; the last one is shorter.
  uint64_t chunkBytes(uint64_t chunk) const;
  // Bytes of the chunks that hold early regions.
  uint64_t earlyBytes() const;

  SnapshotTable table;
  bool plan_anew = false;
  std::string json;
  uint64_t json_hash = 0;
  uint64_t chunk_count = 0;
  uint64_t early_chunks = 0;
  uint64_t state_bytes = 0;           // of all regions
  std::vector<uint32_t> first_piece;  // of each chunk: the first piece that reaches into it
  std::vector<uint32_t> samples;      // of each piece
  // Of each chunk: the first parity that reaches into it; kNoParity: it holds pieces.
  std::vector<uint32_t> first_parity;
  std::vector<uint32_t> parity_samples;                   // of each parity
  std::vector<std::shared_ptr<const ParityCells>> cells;  // of each group; nullptr: no parity
  std::vector<std::vector<uint32_t>> group_regions;
  std::vector<std::vector<uint64_t>> group_bytes;  // of each region in group_regions
  std::vector<uint64_t> group_layouts;             // snapshot/state/agreement.h
};

}  // namespace reft
