#include "snapshot/engine/snapshot_plan.h"

#include <algorithm>
#include <utility>

#include "snapshot/state/agreement.h"
#include "snapshot/vault/hash.h"

namespace reft {

namespace {

constexpr uint32_t kVerifySamples = 8192;  // cache lines a snapshot: about half a millisecond
constexpr uint32_t kMinPieceSamples = 4;

template <typename Piece>
uint64_t endOf(const Piece& piece) {
  return piece.payload_offset + (piece.end - piece.begin);
}

uint32_t samplesOf(uint64_t bytes, uint64_t of) {
  return static_cast<uint32_t>(
      std::max<uint64_t>(kMinPieceSamples, kVerifySamples * bytes / std::max<uint64_t>(of, 1)));
}

}  // namespace

SnapshotPlan::SnapshotPlan(SnapshotTable of, bool anew)
    : table(std::move(of)),
      plan_anew(anew),
      json(table.toJson()),
      group_layouts(groupLayouts(table)) {
  json_hash = hashBytes(json.data(), json.size());
  chunk_count = (table.payload_bytes + table.chunk_bytes - 1) / table.chunk_bytes;
  early_chunks = table.early_bytes / table.chunk_bytes;
  uint32_t piece = 0, parity = 0;
  for (uint64_t chunk = 0; chunk < chunk_count; ++chunk) {
    const uint64_t begin = chunk * table.chunk_bytes, end = begin + chunkBytes(chunk);
    while (piece < table.pieces.size() && endOf(table.pieces[piece]) <= begin) {
      ++piece;
    }
    first_piece.push_back(piece);
    while (parity < table.parities.size() && endOf(table.parities[parity]) <= begin) {
      ++parity;
    }
    const bool holds_parity =
        parity < table.parities.size() && table.parities[parity].payload_offset < end;
    first_parity.push_back(holds_parity ? parity : kNoParity);
  }
  for (const Piece& p : table.pieces) {
    samples.push_back(samplesOf(p.end - p.begin, table.payload_bytes));
  }
  cells.resize(table.groups.size());
  for (const ParityPiece& p : table.parities) {
    std::shared_ptr<const ParityCells>& of = cells[p.group];
    if (of == nullptr) {
      const auto group = static_cast<int32_t>(p.group);
      of = std::make_shared<const ParityCells>(table, group, table.memberOf(group));
    }
    // Each sample of a parity is one of each cell under it.
    const uint64_t under = of->set().size() - 1;
    parity_samples.push_back(samplesOf((p.end - p.begin) / under, table.payload_bytes));
  }
  group_regions.resize(table.groups.size());
  group_bytes.resize(table.groups.size());
  for (uint32_t r = 0; r < table.regions.size(); ++r) {
    const RegionInfo& region = table.regions[r];
    state_bytes += region.bytes;
    if (region.group >= 0) {
      group_regions[static_cast<size_t>(region.group)].push_back(r);
      group_bytes[static_cast<size_t>(region.group)].push_back(region.bytes);
    }
  }
}

uint64_t SnapshotPlan::chunkBytes(uint64_t chunk) const {
  return std::min(table.chunk_bytes, table.payload_bytes - chunk * table.chunk_bytes);
}

uint64_t SnapshotPlan::earlyBytes() const {
  return std::min(early_chunks * table.chunk_bytes, table.payload_bytes);
}

}  // namespace reft
