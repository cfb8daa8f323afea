#include "snapshot/restore/decoding.h"

#include <algorithm>
#include <string>

#include "intercept/base/error.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr uint64_t kAtOnceBeyond = uint64_t{4} << 10;  // of what the shard lacks at its end

// Goes through ranges of live memory.
class Walk {
 public:
  Walk(const LiveWriter& live, std::vector<ShardRange> ranges)
      : live_(live), ranges_(std::move(ranges)) {}

  bool isDone() const { return next_ == ranges_.size(); }
  uint64_t left() const { return ranges_[next_].end - ranges_[next_].begin; }  // of this range
  std::byte* here() const { return live_.hostAddress(ranges_[next_]); }
  void advance(uint64_t bytes) {
    if (isDone()) {
      return;
    }
    ranges_[next_].begin += bytes;
    if (ranges_[next_].begin == ranges_[next_].end) {
      ++next_;
    }
  }

 private:
  const LiveWriter& live_;
  std::vector<ShardRange> ranges_;
  size_t next_ = 0;
};

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
  visits_.resize(keepers_.size());
}

void Decoding::put(size_t i, uint64_t begin, std::span<const std::byte> parity,
                   const LiveWriter& live) {
  std::vector<ShardRange> ranges;
  cells_.ranges(shard_, keepers_.at(i), begin, begin + parity.size(), ranges);
  live.scatter(ranges, parity.data());
  const auto filler = parity.subspan(lengthOf(ranges));
  fillers_[i].insert(fillers_[i].end(), filler.begin(), filler.end());
}

void Decoding::putLater(size_t i, std::function<void(const Take&)> visit) {
  visits_.at(i) = std::move(visit);
}

void Decoding::run(const LiveWriter& live) const {
  for (size_t i = 0; i < keepers_.size(); ++i) {
    if (visits_[i]) {
      visits_[i]([&](uint64_t at, std::span<const std::byte> bytes) {
        runBlock(i, at, at + bytes.size(), bytes.data(), live);
      });
    } else {
      runBlock(i, 0, cells_.bytes(), nullptr, live);
    }
  }
}

// `parity`: its bytes from `begin` on; nullptr: they were put.
void Decoding::runBlock(size_t i, uint64_t begin, uint64_t end, const std::byte* parity,
                        const LiveWriter& live) const {
  std::vector<ShardRange> ranges;
  cells_.ranges(shard_, keepers_[i], begin, end, ranges);
  Walk own(live, std::move(ranges));
  std::vector<Walk> others;
  for (const uint32_t other : cells_.set()) {
    if (other != keepers_[i] && other != shard_) {
      ranges.clear();
      cells_.ranges(other, keepers_[i], begin, end, ranges);
      others.emplace_back(live, std::move(ranges));
    }
  }
  std::vector<std::byte> beyond(kAtOnceBeyond);
  const uint64_t filler_begin = cells_.bytes() - fillers_[i].size();
  std::vector<const std::byte*> with;
  for (uint64_t at = begin; at < end;) {
    uint64_t bytes = own.isDone() ? std::min<uint64_t>(end - at, beyond.size()) : own.left();
    for (const Walk& other : others) {
      bytes = other.isDone() ? bytes : std::min(bytes, other.left());
    }
    std::byte* const into = own.isDone() ? beyond.data() : own.here();
    const std::byte* first = into;  // where it was put
    if (parity != nullptr) {
      first = parity + (at - begin);
    } else if (own.isDone()) {
      first = fillers_[i].data() + (at - filler_begin);
    }
    with.assign(1, first);
    for (const Walk& other : others) {
      if (!other.isDone()) {  // what a shard lacks counts as zeros
        with.push_back(other.here());
      }
    }
    xorOf(into, with, bytes);
    if (own.isDone() && std::any_of(beyond.begin(), beyond.begin() + static_cast<ptrdiff_t>(bytes),
                                    [](std::byte byte) { return byte != std::byte{}; })) {
      throw Corruption("shard " + std::to_string(shard_) +
                       " does not come out of the parities of the others: these, and the shards "
                       "of the others, are not of one state");
    }
    own.advance(bytes);
    for (Walk& other : others) {
      other.advance(bytes);
    }
    at += bytes;
  }
}

}  // namespace reft
