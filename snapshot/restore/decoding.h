// A lost shard from the parities and the shards of the other members of its set
// (snapshot/state/parity_cells.h).
//
// Threads: one at a time. Errors: Corruption if what comes out cannot be what went in; the lost
// shard is then partly written.
#pragma once

#include <cstddef>
#include <cstdint>
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
  // Where the part from source `i` of the move goes.
  std::byte* parity(size_t i) { return parities_[i].get(); }
  // Writes the shard. All parities are there, and the shards of the others are written.
  void run(const LiveWriter& live);

 private:
  uint32_t memberAt(size_t i) const { return move_.sources[i].shard - members_; }

  const Move& move_;
  uint32_t members_;  // of the group
  ParityCells cells_;
  std::vector<HostBuffer> parities_;
};

}  // namespace reft
