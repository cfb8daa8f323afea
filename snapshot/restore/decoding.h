// A lost shard from the parities and the shards of the other members of its set
// (snapshot/state/parity_cells.h). Parities that have arrived lie in its own live memory until
// then; those of a vault of this node are read there.
//
// Threads: one at a time. Errors: Corruption if the parities are not those of the table's set, or
// what comes out cannot be what went in; the lost shard is then partly written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "snapshot/restore/live_writer.h"
#include "snapshot/restore/plan.h"
#include "snapshot/state/parity_cells.h"

namespace reft {

class Decoding {
 public:
  // `move`: decodes by kXor; of the table.
  Decoding(const SnapshotTable& table, const Move& move);

  uint64_t parityBytes() const { return cells_.bytes(); }
  // Takes bytes from `begin` on of the part from source `i` of the move, which has parityBytes().
  // They come in order.
  void put(size_t i, uint64_t begin, std::span<const std::byte> parity, const LiveWriter& live);
  // Calls `visit` for that of source `i`, which hands out its bytes with where they lie in it.
  using Take = std::function<void(uint64_t at, std::span<const std::byte> bytes)>;
  void putLater(size_t i, std::function<void(const Take&)> visit);
  // Writes the shard. All parities are there, and the shards of the others are written.
  void run(const LiveWriter& live) const;

 private:
  void runBlock(size_t i, uint64_t begin, uint64_t end, const std::byte* parity,
                const LiveWriter& live) const;

  uint32_t shard_;
  ParityCells cells_;
  std::vector<uint32_t> keepers_;                // of each source
  std::vector<std::vector<std::byte>> fillers_;  // of each source: its bytes beyond the shard
  std::vector<std::function<void(const Take&)>> visits_;  // of each source; empty: it was put
};

}  // namespace reft
