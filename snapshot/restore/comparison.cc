#include "snapshot/restore/comparison.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "intercept/base/error.h"
#include "snapshot/vault/live_reader.h"

namespace reft {

namespace {

// Device memory is compared in parts of this size.
constexpr uint64_t kStageBytes = uint64_t{4} << 20;
constexpr uint64_t kLargestItem = 16;  // complex128

// Offset of the first byte that differs; `bytes` if none does.
uint64_t firstDifference(const std::byte* a, const std::byte* b, uint64_t bytes) {
  if (std::memcmp(a, b, bytes) == 0) {
    return bytes;
  }
  return static_cast<uint64_t>(std::mismatch(a, a + bytes, b).first - a);
}

// Whether a range of the payload touches a damaged chunk.
bool isDamaged(const std::vector<ChunkFault>& faults, uint64_t chunk_bytes, uint64_t begin,
               uint64_t bytes) {
  const auto at = std::partition_point(faults.begin(), faults.end(), [&](const ChunkFault& fault) {
    return fault.payload_offset + chunk_bytes <= begin;
  });
  return at != faults.end() && at->payload_offset < begin + bytes;
}

}  // namespace

Comparison compare(const SlotSource& saved, const std::vector<LiveRegion>& live,
                   const Download& download) {
  Comparison result;
  std::unordered_map<std::string, size_t> by_name;
  for (size_t i = 0; i < live.size(); ++i) {
    by_name.emplace(live[i].name, i);
  }
  const std::vector<ChunkFault> faults = saved.faults();
  std::vector<std::byte> stage;
  for (const Piece& piece : saved.table().pieces) {
    const RegionInfo& region = saved.table().regions[piece.region];
    const uint64_t bytes = piece.end - piece.begin;
    const auto at = by_name.find(region.name);
    if (at == by_name.end() || live[at->second].bytes != region.bytes ||
        live[at->second].dtype != region.dtype ||
        isDamaged(faults, saved.table().chunk_bytes, piece.payload_offset, bytes)) {
      result.left_out_bytes += bytes;
      continue;
    }
    const std::byte* const payload = saved.bytesAt(piece.payload_offset);
    const std::byte* const memory = live[at->second].memory;
    uint64_t first = bytes;
    bool gone = false;
    for (uint64_t done = 0; done < bytes && first == bytes;) {
      const uint64_t part =
          std::min(bytes - done, memory == nullptr ? kStageBytes : LiveReader::kMostBytes);
      const std::byte* now = nullptr;
      if (memory == nullptr) {
        stage.resize(part);
        download(at->second, piece.begin + done, stage);
        now = stage.data();
      } else {
        now = LiveReader::ofThread().read(memory + piece.begin + done, part);
        gone = now == nullptr;
        if (gone) {
          break;
        }
      }
      const uint64_t same = firstDifference(payload + done, now, part);
      first = same == part ? bytes : done + same;
      done += part;
    }
    if (gone) {
      result.left_out_bytes += bytes;
      continue;
    }
    result.compared_bytes += bytes;
    if (first < bytes && result.differences.size() < kMostDifferences) {
      const uint64_t skipped = first / kLargestItem * kLargestItem;
      result.differences.push_back({region.name, piece.begin, piece.end, piece.begin + first,
                                    piece.begin + skipped,
                                    std::string(reinterpret_cast<const char*>(payload + skipped),
                                                std::min(bytes - skipped, kMostSampleBytes)),
                                    region.early || saved.isSealed()});
    }
  }
  if (!saved.isUnchanged()) {
    throw Corruption("step " + std::to_string(saved.step()) +
                     ": its slot was overwritten while it was compared");
  }
  return result;
}

}  // namespace reft
