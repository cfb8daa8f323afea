// Copies regions in host memory. A copy thread reads a block of them
// (snapshot/vault/live_reader.h), then stores it in the slot and hashes it in one pass; at the gate
// the thread that trains copies along until nothing is left. A chunk of a parity is made of blocks
// of all cells under it, in the cache.
//
// Threads, errors: as in copier.h.
#pragma once

#include <span>

#include "snapshot/engine/copier.h"
#include "snapshot/state/table.h"
#include "snapshot/vault/copy.h"
#include "snapshot/vault/live_reader.h"

namespace reft {

class HostCopier final : public Copier {
 public:
  using Copier::Copier;

  Way way(const Wanted& wanted) const override;
  bool hostWaits() const override { return true; }
  bool placed() const override;
  void atPoint() override;
  void gate(std::span<const DeviceStream> streams) override;
  bool copyNext(Tier tier, const Sink& sink) override;
  using Copier::copyNext;

 private:
  // Returns the bytes of the chunk.
  uint64_t copyChunk(uint64_t chunk, Tier tier);
  void copyPieces(uint64_t chunk, ChunkHasher& hasher);
  void makeParity(uint64_t chunk, ChunkHasher& hasher);
  // XORs the live bytes of the first `count` ranges, one behind the other, into `sum`; those of the
  // next are fetched. False: not all could be read.
  bool addLive(std::span<const ShardRange> ranges, size_t count, std::byte* sum);
  // A block could not be read whole: notes which of its regions are gone.
  void findLost(std::span<const iovec> parts, std::span<const uint32_t> regions);
};

}  // namespace reft
