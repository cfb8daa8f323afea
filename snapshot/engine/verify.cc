#include "snapshot/engine/verify.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "intercept/base/hash.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr uint32_t kDigestSamples = 256;  // cache lines of a sharding group
constexpr uint64_t kLine = 64;
constexpr uint64_t kWholeParity = 4096;  // up to here, all lines are compared

bool isOnDevice(std::span<const int> devices, uint32_t region) {
  return !devices.empty() && devices[region] >= 0;
}

}  // namespace

uint64_t sampleSeed(int64_t step) {
  return static_cast<uint64_t>(step) * kGoldenRatio;
}

Verify::Verify(std::shared_ptr<const SnapshotPlan> plan, int64_t step, bool full)
    : plan_(std::move(plan)), seed_(sampleSeed(step)), full_(full) {}

uint64_t Verify::hashOf(size_t piece, const std::byte* data) const {
  const Piece& of = plan_->table.pieces[piece];
  return sampleHash(data, of.end - of.begin, full_ ? 0 : plan_->samples[piece], seed_ + piece);
}

void Verify::sample(std::span<const std::byte* const> addresses, std::span<const int> devices,
                    std::shared_ptr<const VersionReader> versions) {
  versions_ = std::move(versions);
  if (versions_ != nullptr) {
    versions_at_point_.reserve(addresses.size());
    for (size_t region = 0; region < addresses.size(); ++region) {
      versions_at_point_.push_back(versions_->version(region));
    }
  }
  const std::vector<Piece>& pieces = plan_->table.pieces;
  sampled_.reserve(pieces.size());
  sample_hashes_.reserve(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    sampled_.push_back(!plan_->table.regions[piece.region].early &&
                       !isOnDevice(devices, piece.region));
    sample_hashes_.push_back(sampled_[i] ? hashOf(i, addresses[piece.region] + piece.begin) : 0);
  }
  sampleParities(addresses);
}

LineSamples Verify::linesOf(size_t parity) const {
  const ParityPiece& of = plan_->table.parities[parity];
  const bool all = full_ || of.end - of.begin <= kWholeParity;
  return {of.end - of.begin, all ? UINT32_MAX : plan_->parity_samples[parity], seed_ + parity};
}

const std::vector<ShardRange>& Verify::under(const ParityPiece& parity, uint64_t line,
                                             uint32_t shard) {
  ranges_.clear();
  const uint64_t at = parity.begin + line;
  const SnapshotTable& table = plan_->table;
  plan_->cells[parity.group]->ranges(shard, table.memberOf(static_cast<int32_t>(parity.group)), at,
                                     at + kLine, ranges_);
  return ranges_;
}

// Parities that cover early regions are made before the point returns, as those are copied.
void Verify::sampleParities(std::span<const std::byte* const> addresses) {
  const SnapshotTable& table = plan_->table;
  for (size_t i = 0; i < table.parities.size(); ++i) {
    const ParityPiece& parity = table.parities[i];
    if (parity.payload_offset < table.early_bytes) {
      continue;
    }
    const uint32_t own = table.memberOf(static_cast<int32_t>(parity.group));
    LineSamples lines = linesOf(i);
    for (uint32_t k = 0; k < lines.count(); ++k) {
      const uint64_t line = lines.next();
      std::array<std::byte, kLine> sum{};
      for (const uint32_t shard : plan_->cells[parity.group]->set()) {
        if (shard == own) {
          continue;
        }
        std::byte* into = sum.data();
        for (const ShardRange& range : under(parity, line, shard)) {
          xorInto(into, addresses[range.region] + range.begin, range.end - range.begin);
          into += range.end - range.begin;
        }
      }
      parity_hashes_.push_back(hashBytes(sum.data(), sum.size()));
    }
  }
}

void Verify::compareParities(const std::byte* payload) {
  const SnapshotTable& table = plan_->table;
  size_t next = 0;
  for (size_t i = 0; i < table.parities.size(); ++i) {
    const ParityPiece& parity = table.parities[i];
    if (parity.payload_offset < table.early_bytes) {
      continue;
    }
    const uint32_t own = table.memberOf(static_cast<int32_t>(parity.group));
    LineSamples lines = linesOf(i);
    for (uint32_t k = 0; k < lines.count(); ++k) {
      const uint64_t line = lines.next();
      if (hashBytes(payload + parity.payload_offset + line, kLine) == parity_hashes_[next++]) {
        continue;
      }
      for (const uint32_t shard : plan_->cells[parity.group]->set()) {
        if (shard != own) {
          for (const ShardRange& range : under(parity, line, shard)) {
            late_.push_back(range.region);
          }
        }
      }
    }
  }
}

// Early regions are copied before anything may write them.
bool Verify::compares(uint32_t region) const {
  return !plan_->table.regions[region].early && versions_ != nullptr;
}

void Verify::copied(uint32_t region) {
  if (!compares(region)) {
    return;
  }
  if (!versions_->stands(region)) {
    lost(region);
  } else if (versions_->version(region) != versions_at_point_[region]) {
    const MutexLock lock(mutex_);
    late_.push_back(region);
  }
}

void Verify::lost(uint32_t region) {
  const MutexLock lock(mutex_);
  late_.push_back(region);
  any_lost_ = true;
}

void Verify::compareVersions() {
  for (uint32_t region = 0; versions_ != nullptr && region < plan_->table.regions.size();
       ++region) {
    copied(region);
  }
  versions_.reset();
}

void Verify::compareSamples(const std::byte* payload) {
  const MutexLock lock(mutex_);
  if (!late_.empty()) {
    return;
  }
  const std::vector<Piece>& pieces = plan_->table.pieces;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (sampled_[i] && hashOf(i, payload + pieces[i].payload_offset) != sample_hashes_[i]) {
      late_.push_back(pieces[i].region);
    }
  }
  compareParities(payload);
}

std::vector<uint32_t> Verify::late() const {
  const MutexLock lock(mutex_);
  return late_;
}

bool Verify::anyLost() const {
  const MutexLock lock(mutex_);
  return any_lost_;
}

bool groupOnDevice(const SnapshotPlan& plan, size_t group, std::span<const int> devices) {
  const std::vector<uint32_t>& regions = plan.group_regions[group];
  return std::any_of(regions.begin(), regions.end(),
                     [&](uint32_t region) { return isOnDevice(devices, region); });
}

uint64_t groupDigest(const SnapshotPlan& plan, size_t group,
                     std::span<const std::byte* const> addresses, int64_t step) {
  const uint64_t seed = sampleSeed(step);
  const uint64_t bytes =
      std::accumulate(plan.group_bytes[group].begin(), plan.group_bytes[group].end(), uint64_t{0});
  uint64_t digest = seed;
  // In the group, not in the table: members have different private regions in between.
  uint64_t position = 0;
  for (const uint32_t region : plan.group_regions[group]) {
    const uint64_t size = plan.table.regions[region].bytes;
    const auto samples = static_cast<uint32_t>(
        std::max<uint64_t>(1, kDigestSamples * size / std::max<uint64_t>(bytes, 1)));
    digest = digest * 31 + sampleHash(addresses[region], size, samples, seed + position++);
  }
  return digest;
}

std::vector<uint64_t> groupDigests(const SnapshotPlan& plan,
                                   std::span<const std::byte* const> addresses,
                                   std::span<const int> devices, int64_t step) {
  std::vector<uint64_t> digests;
  for (size_t g = 0; g < plan.group_regions.size(); ++g) {
    if (groupOnDevice(plan, g, devices)) {
      digests.push_back(0);
      continue;
    }
    digests.push_back(groupDigest(plan, g, addresses, step));
  }
  return digests;
}

}  // namespace reft
