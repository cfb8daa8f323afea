#include "snapshot/engine/host_copier.h"

#include <algorithm>

#include "intercept/base/fault.h"
#include "snapshot/engine/snapshot_job.h"
#include "snapshot/engine/telemetry.h"
#include "snapshot/vault/copy.h"

namespace reft {

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
  const std::vector<Piece>& pieces = plan.table.pieces;
  const int64_t start = context_.clock.nowNs();
  hasher.reset();
  std::byte* const payload = context_.vault.payload(job_.slot);
  const uint64_t begin = chunk * plan.table.chunk_bytes;
  const uint64_t end = begin + plan.chunkBytes(chunk);
  uint64_t at = begin;
  for (uint32_t i = plan.first_piece[chunk]; i < pieces.size() && pieces[i].payload_offset < end;
       ++i) {
    const Piece& piece = pieces[i];
    if (at < piece.payload_offset) {
      hasher.zero(payload + at, piece.payload_offset - at);
      at = piece.payload_offset;
    }
    const uint64_t into = at - piece.payload_offset;
    const uint64_t bytes = std::min(end - at, piece.end - piece.begin - into);
    hasher.copy(payload + at, job_.addresses[piece.region] + piece.begin + into, bytes);
    at += bytes;
    if (i == plan.first_piece[chunk]) {
      faultPoint(FaultPoint::mid_chunk, job_.step);
    }
    job_.verify.copied(piece.region);
  }
  if (at < end) {
    hasher.zero(payload + at, end - at);
  }
  context_.vault.chunkHashes(job_.slot)[chunk] = hasher.digest();
  const int64_t now = context_.clock.nowNs();
  job_.copy_ns.fetch_add(now - start);
  context_.telemetry.copied(job_.step, tier, start, now, end - begin);
  return end - begin;
}

}  // namespace reft
