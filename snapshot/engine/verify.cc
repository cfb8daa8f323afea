#include "snapshot/engine/verify.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "intercept/base/hash.h"
#include "snapshot/vault/copy.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr uint32_t kDigestSamples = 256;  // cache lines of a sharding group
// Of a sharding group, the part that a digest covers without gaps: 1 / kParts, within bounds. The
// thread that trains hashes it: at 10 GB/s the largest takes 0.1 ms of a step of gigabytes.
constexpr uint64_t kParts = 2048;
constexpr uint64_t kSmallestPart = uint64_t{16} << 10;
constexpr uint64_t kLargestPart = uint64_t{1} << 20;
constexpr uint64_t kLine = 64;
constexpr uint64_t kWholeParity = 4096;  // of a parity that is compared as a whole, or all of it so
constexpr size_t kMostSuspects = 1024;   // samples that differ

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
  for (size_t group = 0; group < plan_->table.groups.size(); ++group) {
    on_device_.push_back(groupOnDevice(*plan_, group, devices));
  }
  sampleParities(addresses);
}

// Calls fn(begin, bytes) for each sample of a parity.
template <typename Fn>
void Verify::eachSample(size_t parity, Fn fn) const {
  const ParityPiece& of = plan_->table.parities[parity];
  const uint64_t bytes = of.end - of.begin;
  if (full_ || bytes <= kWholeParity) {
    for (uint64_t at = 0; at < bytes; at += kWholeParity) {
      fn(at, std::min(kWholeParity, bytes - at));
    }
    return;
  }
  LineSamples lines(bytes, plan_->parity_samples[parity], seed_ + parity);
  for (uint32_t i = 0; i < lines.count(); ++i) {
    fn(lines.next(), kLine);
  }
}

// Parities that cover early regions are made before the point returns, as those are copied.
bool Verify::isSampled(const ParityPiece& parity) const {
  return parity.payload_offset >= plan_->table.early_bytes && !on_device_[parity.group];
}

void Verify::sampleParities(std::span<const std::byte* const> addresses) {
  const SnapshotTable& table = plan_->table;
  std::array<std::byte, kWholeParity> sum;
  for (size_t i = 0; i < table.parities.size(); ++i) {
    const ParityPiece& parity = table.parities[i];
    if (!isSampled(parity)) {
      continue;
    }
    const ParityCells& cells = *plan_->cells[parity.group];
    const uint32_t own = table.memberOf(static_cast<int32_t>(parity.group));
    eachSample(i, [&](uint64_t begin, uint64_t bytes) {
      std::fill_n(sum.begin(), bytes, std::byte{});
      const uint64_t from = parity.begin + begin;
      cells.eachUnder(own, from, from + bytes, [&](const std::vector<ShardRange>& ranges) {
        std::byte* into = sum.data();
        for (const ShardRange& range : ranges) {
          xorInto(into, addresses[range.region] + range.begin, range.end - range.begin);
          into += range.end - range.begin;
        }
      });
      parity_hashes_.push_back(hashBytes(sum.data(), bytes));
    });
  }
}

void Verify::compareParities(const std::byte* payload) {
  const SnapshotTable& table = plan_->table;
  std::vector<std::set<uint32_t>> suspects;  // the regions under each sample that differs
  size_t next = 0;
  for (size_t i = 0; i < table.parities.size(); ++i) {
    const ParityPiece& parity = table.parities[i];
    if (!isSampled(parity)) {
      continue;
    }
    const ParityCells& cells = *plan_->cells[parity.group];
    const uint32_t own = table.memberOf(static_cast<int32_t>(parity.group));
    eachSample(i, [&](uint64_t begin, uint64_t bytes) {
      if (hashBytes(payload + parity.payload_offset + begin, bytes) == parity_hashes_[next++] ||
          suspects.size() >= kMostSuspects) {
        return;
      }
      std::set<uint32_t>& under = suspects.emplace_back();
      const uint64_t from = parity.begin + begin;
      cells.eachUnder(own, from, from + bytes, [&](const std::vector<ShardRange>& ranges) {
        for (const ShardRange& range : ranges) {
          under.insert(range.region);
        }
      });
    });
  }
  for (const uint32_t region : late_) {
    std::erase_if(suspects, [&](const auto& under) { return under.contains(region); });
  }
  // A sample does not tell which of the regions under it was written: the fewest that explain all
  // samples, found greedily; those that explain as many are all taken.
  while (!suspects.empty()) {
    std::map<uint32_t, size_t> explained;
    size_t most = 0;
    for (const std::set<uint32_t>& under : suspects) {
      for (const uint32_t region : under) {
        most = std::max(most, ++explained[region]);
      }
    }
    for (const auto& one : explained) {
      if (one.second == most) {
        late_.push_back(one.first);
        std::erase_if(suspects, [&](const auto& under) { return under.contains(one.first); });
      }
    }
    std::erase_if(suspects, [](const auto& under) { return under.empty(); });
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

uint64_t groupDigest(const SnapshotTable& table, std::span<const uint32_t> of_group,
                     std::span<const std::byte* const> addresses, int64_t step) {
  const uint64_t seed = sampleSeed(step);
  uint64_t bytes = 0;
  for (const uint32_t region : of_group) {
    bytes += table.regions[region].bytes;
  }
  uint64_t digest = seed;
  // In the group, not in the table: members have different private regions in between.
  uint64_t position = 0;
  const DigestPart part = digestPart(bytes, step);
  uint64_t at = 0;  // of the region's first byte, in the group
  for (const uint32_t region : of_group) {
    const uint64_t size = table.regions[region].bytes;
    const auto samples = static_cast<uint32_t>(
        std::max<uint64_t>(1, kDigestSamples * size / std::max<uint64_t>(bytes, 1)));
    digest = digest * 31 + sampleHash(addresses[region], size, samples, seed + position++);
    const uint64_t begin = std::max(part.begin, at);
    const uint64_t end = std::min(part.end, at + size);
    if (begin < end) {
      digest = digest * 31 + hashBytes(addresses[region] + (begin - at), end - begin);
    }
    at += size;
  }
  return digest;
}

DigestPart digestPart(uint64_t bytes, int64_t step) {
  const uint64_t size = std::clamp((bytes + kParts - 1) / kParts, kSmallestPart, kLargestPart);
  const uint64_t parts = std::max<uint64_t>(1, (bytes + size - 1) / size);
  const auto number = static_cast<uint64_t>(step);
  // Each round begins elsewhere, or snapshots at every second step would see every second part.
  const uint64_t part = (number + mixed(number / parts) % parts) % parts;
  return {part * size, std::min(bytes, (part + 1) * size)};
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
    digests.push_back(groupDigest(plan.table, plan.group_regions[g], addresses, step));
  }
  return digests;
}

}  // namespace reft
