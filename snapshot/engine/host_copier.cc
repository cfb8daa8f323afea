#include "snapshot/engine/host_copier.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "intercept/base/fault.h"
#include "snapshot/engine/snapshot_job.h"
#include "snapshot/engine/telemetry.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr uint32_t kPadding = UINT32_MAX;
constexpr uint64_t kParityBlock = uint64_t{64} << 10;  // with a cell's block, fits the second cache
static_assert(kParityBlock <= LiveReader::kMostBytes);

template <typename Piece>
uint64_t payloadEnd(const Piece& piece) {
  return piece.payload_offset + (piece.end - piece.begin);
}

}  // namespace

Copier::Way HostCopier::way(const Wanted& wanted) const {
  // A control step begins when its copy is done, as every step does under `sync`. Without a gate
  // nothing says when the state is written again; a late write is found, so the copy only hurries.
  if (wanted.control) {
    return {PlacementPolicy::kSync, true};
  }
  return {wanted.gated ? wanted.policy : PlacementPolicy::kEager, false};
}

bool HostCopier::placed() const {
  return job_.policy == PlacementPolicy::kGap;
}

void HostCopier::atPoint() {
  const SnapshotPlan& plan = *job_.plan;
  for (uint64_t chunk = 0; chunk < plan.early_chunks; ++chunk) {
    copyChunk(chunk, Tier::kAtOnce);
  }
  next_.store(plan.early_chunks);
  left_.store(plan.chunk_count - plan.early_chunks);
}

void HostCopier::gate(std::span<const DeviceStream> /*streams*/) {
  release(/*at_gate=*/true);
  copyRest();
  job_.awaitCopied();
  if (job_.check()) {
    context_.wake();
  }
}

bool HostCopier::copyNext(Tier tier, const Sink& sink) {
  const uint64_t chunk = next_.fetch_add(1);
  if (chunk >= job_.plan->chunk_count) {
    return false;
  }
  if (!job_.failed()) {
    if (job_.policy == PlacementPolicy::kSync) {
      tier = Tier::kAtOnce;
    } else if (job_.atGate()) {
      tier = Tier::kGate;
    }
    const uint64_t bytes = copyChunk(chunk, tier);
    if (sink) {
      sink(bytes, tier);
    }
  }
  chunkDone();
  return true;
}

uint64_t HostCopier::copyChunk(uint64_t chunk, Tier tier) {
  thread_local ChunkHasher hasher;
  const SnapshotPlan& plan = *job_.plan;
  const int64_t start = context_.clock.nowNs();
  hasher.reset();
  if (plan.first_parity[chunk] == SnapshotPlan::kNoParity) {
    copyPieces(chunk, hasher);
  } else {
    makeParity(chunk, hasher);
  }
  context_.vault.chunkHashes(job_.slot)[chunk] = hasher.digest();
  const int64_t now = context_.clock.nowNs();
  job_.copy_ns.fetch_add(now - start);
  const uint64_t bytes = plan.chunkBytes(chunk);
  context_.telemetry.copied(job_.step, tier, start, now, bytes);
  return bytes;
}

void HostCopier::copyPieces(uint64_t chunk, ChunkHasher& hasher) {
  thread_local std::vector<iovec> parts;       // of a block, padding included
  thread_local std::vector<uint32_t> regions;  // of the parts
  static constexpr std::array<std::byte, kPage> kZeros{};
  LiveReader& reader = LiveReader::ofThread();
  const SnapshotPlan& plan = *job_.plan;
  const std::vector<Piece>& pieces = plan.table.pieces;
  std::byte* const payload = context_.vault.payload(job_.slot);
  const uint64_t begin = chunk * plan.table.chunk_bytes;
  const uint64_t end = begin + plan.chunkBytes(chunk);
  uint32_t piece = plan.first_piece[chunk];
  for (uint64_t at = begin; at < end && !job_.failed();) {
    parts.clear();
    regions.clear();
    uint64_t to = at;
    const uint64_t block_end = std::min(end, at + LiveReader::kMostBytes);
    while (to < block_end && parts.size() < LiveReader::kMostParts) {
      while (piece < pieces.size() && payloadEnd(pieces[piece]) <= to) {
        ++piece;
      }
      const bool in_piece = piece < pieces.size() && pieces[piece].payload_offset <= to;
      uint64_t bytes = block_end - to;
      if (in_piece) {
        const Piece& of = pieces[piece];
        bytes = std::min(bytes, payloadEnd(of) - to);
        parts.push_back(
            partOf(job_.addresses[of.region] + of.begin + (to - of.payload_offset), bytes));
        regions.push_back(of.region);
      } else {  // padding
        const uint64_t next = piece < pieces.size() ? pieces[piece].payload_offset : end;
        bytes = std::min({bytes, next - to, uint64_t{kZeros.size()}});
        parts.push_back(partOf(kZeros.data(), bytes));
        regions.push_back(kPadding);
      }
      to += bytes;
    }
    if (reader.gather(parts) != to - at) {
      findLost(parts, regions);
      break;
    }
    const std::byte* const last = static_cast<const std::byte*>(parts.back().iov_base);
    hasher.copy(payload + at, reader.data(), to - at,
                {last + parts.back().iov_len, std::min(LiveReader::kMostBytes, end - to)});
    if (at == begin) {
      faultPoint(FaultPoint::mid_chunk, job_.step);
    }
    for (const uint32_t region : regions) {
      if (region != kPadding) {
        job_.verify.copied(region);
      }
    }
    at = to;
  }
}

void HostCopier::makeParity(uint64_t chunk, ChunkHasher& hasher) {
  thread_local std::vector<std::byte> sum(kParityBlock);
  thread_local std::vector<ShardRange> ranges;  // of a block, of all cells under it
  thread_local std::vector<size_t> ends;        // of each cell, in `ranges`
  const SnapshotPlan& plan = *job_.plan;
  const SnapshotTable& table = plan.table;
  std::byte* const payload = context_.vault.payload(job_.slot);
  const uint64_t begin = chunk * table.chunk_bytes;
  const uint64_t end = begin + plan.chunkBytes(chunk);
  uint64_t at = begin;
  for (size_t i = plan.first_parity[chunk]; at < end && !job_.failed(); ++i) {
    const bool is_last = i >= table.parities.size() || table.parities[i].payload_offset >= end;
    const uint64_t from = is_last ? end : std::max(at, table.parities[i].payload_offset);
    hasher.zero(payload + at, from - at);  // padding
    at = from;
    if (is_last) {
      break;
    }
    const ParityPiece& parity = table.parities[i];
    const ParityCells& cells = *plan.cells[parity.group];
    const uint32_t own = table.memberOf(static_cast<int32_t>(parity.group));
    while (at < std::min(end, payloadEnd(parity))) {
      const uint64_t bytes = std::min({kParityBlock, end - at, payloadEnd(parity) - at});
      const uint64_t in_cell = parity.begin + (at - parity.payload_offset);
      std::fill_n(sum.begin(), bytes, std::byte{});
      ranges.clear();
      ends.clear();
      for (const uint32_t shard : cells.set()) {
        if (shard != own) {
          cells.ranges(shard, own, in_cell, in_cell + bytes, ranges);
          ends.push_back(ranges.size());
        }
      }
      size_t first = 0;
      for (const size_t last : ends) {
        if (!addLive(std::span(ranges).subspan(first), last - first, sum.data())) {
          return;
        }
        first = last;
      }
      hasher.copy(payload + at, sum.data(), bytes);
      if (at == begin) {
        faultPoint(FaultPoint::mid_chunk, job_.step);
      }
      at += bytes;
    }
  }
}

bool HostCopier::addLive(std::span<const ShardRange> ranges, size_t count, std::byte* sum) {
  thread_local std::vector<iovec> parts;
  thread_local std::vector<uint32_t> regions;
  LiveReader& reader = LiveReader::ofThread();
  const auto liveOf = [&](const ShardRange& range) {
    return std::span(job_.addresses[range.region] + range.begin, range.end - range.begin);
  };
  for (size_t next = 0; next < count;) {
    parts.clear();
    regions.clear();
    uint64_t bytes = 0;
    for (; next < count && parts.size() < LiveReader::kMostParts; ++next) {
      const auto live = liveOf(ranges[next]);
      parts.push_back(partOf(live.data(), live.size()));
      regions.push_back(ranges[next].region);
      bytes += live.size();
    }
    if (reader.gather(parts) != bytes) {
      findLost(parts, regions);
      return false;
    }
    xorInto(sum, reader.data(), bytes,
            next < ranges.size() ? liveOf(ranges[next]) : std::span<const std::byte>());
    sum += bytes;
    for (const uint32_t region : regions) {
      job_.verify.copied(region);
    }
  }
  return true;
}

// Each part by itself: a write that faults says no more exactly than to a page where it ended.
void HostCopier::findLost(std::span<const iovec> parts, std::span<const uint32_t> regions) {
  LiveReader& reader = LiveReader::ofThread();
  job_.fail();
  if (!reader.why().empty()) {
    context_.telemetry.note("step " + std::to_string(job_.step) + " dropped: " + reader.why());
    return;
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (regions[i] != kPadding && reader.read(static_cast<const std::byte*>(parts[i].iov_base),
                                              parts[i].iov_len) == nullptr) {
      job_.verify.lost(regions[i]);
    }
  }
}

}  // namespace reft
