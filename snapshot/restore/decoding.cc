#include "snapshot/restore/decoding.h"

#include <algorithm>
#include <string>

#include "intercept/base/error.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr uint64_t kDecodedAtOnce = uint64_t{64} << 10;  // stays in the cache

const GroupInfo& groupOf(const SnapshotTable& table, const Move& move) {
  if (move.group < 0 || static_cast<size_t>(move.group) >= table.groups.size()) {
    throw Corruption("the plan decodes a group that the snapshot has not");
  }
  const GroupInfo& group = table.groups[static_cast<size_t>(move.group)];
  if (paritySetOf(group, move.shard) == nullptr) {
    throw Corruption("the plan decodes shard " + std::to_string(move.shard) + " of group " +
                     group.id + ", which is in no parity set");
  }
  return group;
}

uint64_t lengthOf(const std::vector<ShardRange>& ranges) {
  uint64_t bytes = 0;
  for (const ShardRange& range : ranges) {
    bytes += range.end - range.begin;
  }
  return bytes;
}

}  // namespace

Decoding::Decoding(const SnapshotTable& table, const Move& move)
    : shard_(move.shard),
      cells_(table.regions, move.group, static_cast<uint32_t>(groupOf(table, move).ranks.size()),
             *paritySetOf(groupOf(table, move), move.shard)) {
  const auto members = static_cast<uint32_t>(groupOf(table, move).ranks.size());
  for (const MoveSource& source : move.sources) {
    keepers_.push_back(source.shard - members);
  }
  std::vector<uint32_t> others = cells_.set(), found = keepers_;
  std::erase(others, shard_);
  std::ranges::sort(others);
  std::ranges::sort(found);
  if (others != found) {
    throw Corruption("the plan decodes shard " + std::to_string(shard_) +
                     " from parities that are not those of its set");
  }
  fillers_.resize(keepers_.size());
}

void Decoding::put(size_t i, std::span<const std::byte> parity, const LiveWriter& live) {
  std::vector<ShardRange> ranges;
  cells_.ranges(shard_, keepers_.at(i), 0, cells_.bytes(), ranges);
  live.scatter(ranges, parity.data());
  const auto filler = parity.subspan(lengthOf(ranges));
  fillers_[i].assign(filler.begin(), filler.end());
}

void Decoding::run(const LiveWriter& live) const {
  std::vector<std::byte> sum(kDecodedAtOnce);
  for (size_t i = 0; i < keepers_.size(); ++i) {
    for (uint64_t begin = 0; begin < cells_.bytes(); begin += kDecodedAtOnce) {
      const uint64_t end = std::min(begin + kDecodedAtOnce, cells_.bytes());
      runBlock(i, begin, end, std::span(sum).first(end - begin), live);
    }
  }
}

void Decoding::runBlock(size_t i, uint64_t begin, uint64_t end, std::span<std::byte> sum,
                        const LiveWriter& live) const {
  std::vector<ShardRange> own, ranges;
  cells_.ranges(shard_, keepers_[i], begin, end, own);
  live.gather(own, sum.data());
  const uint64_t inside = lengthOf(own);
  const uint64_t filler_begin = cells_.bytes() - fillers_[i].size();
  if (inside < sum.size()) {
    std::copy_n(fillers_[i].begin() + static_cast<ptrdiff_t>(begin + inside - filler_begin),
                sum.size() - inside, sum.begin() + static_cast<ptrdiff_t>(inside));
  }
  for (const uint32_t other : cells_.set()) {
    if (other == keepers_[i] || other == shard_) {
      continue;
    }
    ranges.clear();
    cells_.ranges(other, keepers_[i], begin, end, ranges);
    std::byte* into = sum.data();
    for (const ShardRange& range : ranges) {
      xorInto(into, live.hostAddress(range), range.end - range.begin);
      into += range.end - range.begin;
    }
  }
  live.scatter(own, sum.data());
  if (std::ranges::any_of(sum.subspan(inside),
                          [](std::byte byte) { return byte != std::byte{}; })) {
    throw Corruption("shard " + std::to_string(shard_) +
                     " does not come out of the parities of the others: these, and the shards of "
                     "the others, are not of one state");
  }
}

}  // namespace reft
