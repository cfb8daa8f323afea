// Compares live regions with what a slot holds of them, byte for byte.
//
// A rank that has computed a step again tells by this whether the restore before it was right
// (python/reft/_session/verification.py). Only the slot's own pieces are compared: the members of a
// sharding group compare their shards, so together they compare everything once.
//
// Threads: re-entrant. Errors: none for chunks that are damaged or were not copied, and for live
// memory that is gone, which are counted and left out; Corruption if the slot is overwritten
// meanwhile; what `download` throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "snapshot/restore/restorer.h"
#include "snapshot/restore/slot_source.h"

namespace reft {

// A piece of a region whose bytes differ.
struct PieceDifference {
  std::string region;
  uint64_t begin = 0, end = 0;  // of the piece, in the region's bytes
  uint64_t first = 0;           // offset in the region of the first byte that differs
  // Saved bytes of the region from `sample_at` on, which is at `first` or up to 15 bytes before it,
  // so that no item is cut; at most kMostSampleBytes.
  uint64_t sample_at = 0;
  std::string sample;
  // The saved bytes are those of the program point: the slot was sealed, or they were copied before
  // the optimizer step returned. Late writes to others are found when a slot is sealed.
  bool certain = false;
};

struct Comparison {
  uint64_t compared_bytes = 0;
  uint64_t left_out_bytes = 0;  // of other chunks, and of regions that do not exist now
  std::vector<PieceDifference> differences;
};

// Together at most 50 MiB, however large the state is that differs.
inline constexpr uint64_t kMostSampleBytes = uint64_t{256} << 10;
inline constexpr size_t kMostDifferences = 200;

// Reads bytes [begin, begin + into.size()) of a live region on a device.
using Download = std::function<void(size_t region, uint64_t begin, std::span<std::byte> into)>;

Comparison compare(const SlotSource& saved, const std::vector<LiveRegion>& live,
                   const Download& download);

}  // namespace reft
