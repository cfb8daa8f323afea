// Copies regions in host memory. A copy thread has the kernel read a block of them
// (snapshot/vault/live_reader.h), then stores it in the slot and hashes it in one pass; at the gate
// the thread that trains copies along until nothing is left.
//
// Threads, errors: as in copier.h.
#pragma once

#include <span>

#include "snapshot/engine/copier.h"
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
  // A block could not be read whole: notes which of its regions are gone.
  void findLost(std::span<const iovec> parts, std::span<const uint32_t> regions);
};

}  // namespace reft
