#include "snapshot/restore/restorer.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <set>
#include <utility>

#include "intercept/base/error.h"
#include "snapshot/device/replica_lines.h"
#include "snapshot/engine/verify.h"
#include "snapshot/restore/decoding.h"
#include "snapshot/restore/exchange.h"

namespace reft {

namespace {

uint64_t bytesOf(const std::vector<ShardRange>& ranges) {
  return std::accumulate(
      ranges.begin(), ranges.end(), uint64_t{0},
      [](uint64_t sum, const ShardRange& range) { return sum + range.end - range.begin; });
}

// The rows of split tensors that a vault has and the receiver has now, one behind the other.
std::vector<SlotSource::Copy> rowsIn(const SlotSource& vault, const RestorePlan& plan,
                                     const Transfer& transfer) {
  std::vector<SlotSource::Copy> copies;
  uint64_t at = 0;
  const std::vector<SplitTensor>& splits = vault.table().splits;
  for (const RowsFor& rows : rowsFor(plan, splits, transfer.vault, transfer.receiver)) {
    const std::string& name = splits[rows.split].name;
    copies.push_back(
        {vault.offsetWithin(name, rows.from, rows.from + rows.bytes), rows.bytes, nullptr, at});
    at += rows.bytes;
  }
  return copies;
}

// Those of bytes [begin, end) of what `copies` put one behind the other.
std::vector<SlotSource::Copy> partOf(const std::vector<SlotSource::Copy>& copies, uint64_t begin,
                                     uint64_t end) {
  std::vector<SlotSource::Copy> part;
  for (const SlotSource::Copy& copy : copies) {
    const uint64_t a = std::max(copy.at, begin), b = std::min(copy.at + copy.bytes, end);
    if (a < b) {
      part.push_back({copy.from + (a - copy.at), b - a, nullptr, a - begin});
    }
  }
  return part;
}

// Those of `bytes` from `begin` on of what follows each other in `ranges`.
std::vector<ShardRange> within(const std::vector<ShardRange>& ranges, uint64_t begin,
                               uint64_t bytes) {
  std::vector<ShardRange> part;
  uint64_t at = 0;
  for (const ShardRange& range : ranges) {
    const uint64_t length = range.end - range.begin;
    const uint64_t a = std::max(at, begin), b = std::min(at + length, begin + bytes);
    if (a < b) {
      part.push_back({range.region, range.begin + (a - at), range.begin + (b - at)});
    }
    at += length;
  }
  return part;
}

std::string describe(const std::string& dtype, const std::vector<int64_t>& shape) {
  std::string text = dtype + " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

// The digest that members record of a group if some of it is on a device.
uint64_t digestOfLines(const SnapshotTable& table, const std::vector<uint32_t>& of_group,
                       const std::vector<const std::byte*>& addresses, int64_t step) {
  std::vector<uint64_t> bytes;
  for (const uint32_t region : of_group) {
    bytes.push_back(table.regions[region].bytes);
  }
  const std::vector<ReplicaLine> lines = replicaLines(bytes, sampleSeed(step));
  std::vector<std::byte> read(ReplicaLine::kGroupBytes);
  for (size_t i = 0; i < lines.size(); ++i) {
    std::memcpy(read.data() + i * ReplicaLine::kMostBytes,
                addresses[of_group[lines[i].region]] + lines[i].offset, lines[i].bytes);
  }
  return replicaDigest(lines, read.data(), static_cast<uint64_t>(step));
}

// Whether the decoded groups hold what their members recorded of them. Where they lay is not
// recorded, so it may be either digest.
void compareDigests(const RestorePlan& plan, const SnapshotTable& table,
                    const std::set<int32_t>& decoded, const LiveWriter& live) {
  for (const int32_t group : decoded) {
    std::vector<uint32_t> of_group;
    std::vector<const std::byte*> addresses(table.regions.size());
    for (uint32_t region = 0; region < table.regions.size(); ++region) {
      if (table.regions[region].group == group) {
        of_group.push_back(region);
        addresses[region] = live.hostAddress({region, 0, 0});
      }
    }
    const std::string& id = table.groups[static_cast<size_t>(group)].id;
    const uint64_t recorded = plan.groups.at(id).digest;
    if (recorded != 0 && groupDigest(table, of_group, addresses, plan.step) != recorded &&
        digestOfLines(table, of_group, addresses, plan.step) != recorded) {
      throw Corruption("group " + id + " as decoded from parities is not what its members had at " +
                       "step " + std::to_string(plan.step));
    }
  }
}

// Copies from vaults of this node, each of which is read from front to back. What goes to a device
// is staged in host memory, as much at a time as an exchange has under way.
class LocalCopies {
 public:
  LocalCopies(const LiveWriter& live, uint64_t piece_bytes)
      : live_(live), piece_bytes_(piece_bytes) {}

  // Bytes of a range of live memory, from `at` on in the payload.
  void add(const SlotSource& from, uint64_t at, const ShardRange& range) {
    const uint64_t bytes = range.end - range.begin;
    if (std::byte* const to = live_.hostAddress(range); to != nullptr) {
      works_[&from].copies.push_back({at, bytes, to});
      return;
    }
    for (uint64_t done = 0; done < bytes; done += piece_bytes_) {
      const uint64_t length = std::min(piece_bytes_, bytes - done);
      Work& work = works_[&from];
      HostBuffer& buffer = work.staged
                               .emplace_back(ShardRange{range.region, range.begin + done,
                                                        range.begin + done + length},
                                             hostBuffer(length))
                               .second;
      work.copies.push_back({at + done, length, buffer.get()});
      staged_bytes_ += length;
      if (staged_bytes_ >= Exchange::kUnderWay * piece_bytes_) {
        finish();
      }
    }
  }

  void finish() {
    for (auto& [from, work] : works_) {
      from->copy(std::move(work.copies));
      for (const auto& [range, bytes] : work.staged) {
        live_.upload(range, bytes.get());
      }
    }
    works_.clear();
    staged_bytes_ = 0;
  }

 private:
  struct Work {
    std::vector<SlotSource::Copy> copies;
    std::vector<std::pair<ShardRange, HostBuffer>> staged;
  };

  const LiveWriter& live_;
  uint64_t piece_bytes_;
  std::map<const SlotSource*, Work> works_;
  uint64_t staged_bytes_ = 0;
};

}  // namespace

Restorer::Restorer(RestorePlan plan, int rank, OpenVault open, uint64_t message_bytes)
    : plan_(std::move(plan)),
      rank_(rank),
      owner_(plan_.ownerFor(rank)),
      open_(std::move(open)),
      message_bytes_(message_bytes) {}

SlotSource& Restorer::slot(int vault) {
  std::unique_ptr<SlotSource>& slot = slots_[vault];
  if (slot == nullptr) {
    const VaultPlace& place = plan_.vaults.at(static_cast<size_t>(vault));
    const UniqueFd fd = open_(vault, place.is_copy);
    slot = std::make_unique<SlotSource>(fd.get(), place.slot, plan_.step, plan_.incarnation);
  }
  return *slot;
}

const SnapshotTable& Restorer::table() {
  if (hasOwnersVault()) {
    return slot(owner_).table();
  }
  if (!sent_table_) {
    throw Unavailable("the tensor table of rank " + std::to_string(owner_) + " has not arrived");
  }
  return *sent_table_;
}

const SnapshotTable& Restorer::wanted() {
  if (plan_.rows_tag == 0) {
    return table();
  }
  if (!wanted_) {
    wanted_ = tableOf(plan_, rank_, table());
  }
  return *wanted_;
}

std::vector<std::string> Restorer::splits() {
  std::vector<std::string> names;
  if (plan_.rows_tag > 0) {
    for (const SplitTensor& split : table().splits) {
      names.push_back(split.name);
    }
  }
  return names;
}

std::vector<std::string> Restorer::parted() {
  std::vector<std::string> names;
  const SnapshotTable& saved = table();
  for (const RegionInfo& region : saved.regions) {
    if (plan_.isResized() && region.group >= 0 &&
        static_cast<int>(saved.groups[static_cast<size_t>(region.group)].ranks.size()) <
            plan_.savedBy()) {
      names.push_back(region.name);
    }
  }
  return names;
}

std::vector<std::pair<std::string, std::vector<int64_t>>> Restorer::otherParts() {
  std::vector<std::pair<std::string, std::vector<int64_t>>> found;
  if (plan_.rows_tag == 0) {
    return found;
  }
  for (const SplitTensor& split : table().splits) {
    const RowRange had = rowsOf(split.shape[0], plan_.savedBy(), owner_);
    const RowRange has = plan_.rowsNow(split, rank_);
    if (had.begin != has.begin || had.end != has.end) {
      found.emplace_back(split.dtype, split.shapeOf(plan_.savedBy(), owner_));
    }
  }
  return found;
}

void Restorer::dealRows(int parts) {
  if (parts < 1 || plan_.shape.world % parts != 0) {
    throw InvalidArgument("parts", std::to_string(parts),
                          "a divisor of " + std::to_string(plan_.shape.world) + " ranks");
  }
  plan_.row_parts = parts;
  wanted_.reset();
}

std::string Restorer::objects() {
  if (!hasOwnersVault()) {
    throw Unavailable("the small state of rank " + std::to_string(owner_) + " lies on node " +
                      std::to_string(plan_.vaults[static_cast<size_t>(owner_)].node) +
                      ", not on this one");
  }
  return slot(owner_).objects();
}

std::string Restorer::difference(const std::vector<LiveRegion>& live) {
  std::map<std::string, const LiveRegion*> by_name;
  for (const LiveRegion& region : live) {
    by_name.emplace(region.name, &region);
  }
  for (const RegionInfo& saved : wanted().regions) {
    const auto at = by_name.find(saved.name);
    if (at == by_name.end()) {
      return saved.name + " (" + describe(saved.dtype, saved.shape) +
             ") was saved and does not exist now";
    }
    const LiveRegion& now = *at->second;
    if (now.shape != saved.shape || now.bytes != saved.bytes || now.dtype != saved.dtype) {
      return saved.name + " was " + describe(saved.dtype, saved.shape) + " and is " +
             describe(now.dtype, now.shape) + " now";
    }
    by_name.erase(at);
  }
  if (by_name.empty()) {
    return "";
  }
  return by_name.begin()->first + " exists now and was not saved" +
         (by_name.size() > 1 ? " (and " + std::to_string(by_name.size() - 1) + " more)" : "");
}

uint64_t Restorer::restore(const std::vector<LiveRegion>& live, PeerTransport* transport,
                           const Upload& upload) {
  const SnapshotTable& saved = wanted();
  const std::vector<Move> moves = movesOf(plan_, rank_, saved);
  std::set<int32_t> decoded;
  for (const Move& move : moves) {
    if (move.decode == Decode::kXor) {
      decoded.insert(move.group);
    }
  }
  LiveWriter writing(saved, live, upload, decoded);
  uint64_t written = 0, saved_bytes = 0;
  for (const Move& move : moves) {
    written += bytesOf(move.ranges);
  }
  for (const RegionInfo& region : saved.regions) {
    saved_bytes += region.bytes;
  }
  const auto reads = [this](const SlotSource& from, uint64_t bytes) {
    (from.isOnStorage() ? sources_.storage_bytes : sources_.memory_bytes) += bytes;
  };
  if (written != saved_bytes) {  // before a byte is written
    throw Corruption("the plan restores " + std::to_string(written) + " of " +
                     std::to_string(saved_bytes) + " bytes");
  }

  LocalCopies local(writing, message_bytes_);
  // What comes from other nodes, by tag.
  struct Awaited {
    uint64_t bytes;
    Exchange::Take take;
  };
  std::map<uint32_t, Awaited> awaited;
  const auto await = [&](uint32_t tag, uint64_t bytes, Exchange::Take take) {
    if (!awaited.emplace(tag, Awaited{bytes, std::move(take)}).second) {
      throw Corruption("the plan gives two parts of one rank the same tag");
    }
  };
  std::deque<Decoding> decodings;
  for (const Move& move : moves) {
    if (move.decode == Decode::kXor) {
      Decoding& decoding = decodings.emplace_back(saved, move);
      for (size_t i = 0; i < move.sources.size(); ++i) {
        const MoveSource& source = move.sources[i];
        const uint64_t bytes = decoding.parityBytes();
        if (source.kind == MoveSource::Kind::kPeer) {
          await(source.tag, bytes, [&decoding, &writing, i](uint64_t begin, auto parity) {
            decoding.put(i, begin, parity, writing);
          });
        } else {
          const std::string& id = saved.groups[static_cast<size_t>(move.group)].id;
          const SlotSource& from = slot(source.vault);
          reads(from, bytes);
          decoding.putLater(i,
                            [&from, &id, part = source.shard, bytes](const Decoding::Take& take) {
                              from.visitPart(id, part, bytes, take);
                            });
        }
      }
      continue;
    }
    const MoveSource& source = move.sources.front();  // kCopy has one
    if (source.kind == MoveSource::Kind::kPeer) {
      await(source.tag, bytesOf(move.ranges), [&move, &writing](uint64_t begin, auto bytes) {
        writing.scatter(within(move.ranges, begin, bytes.size()), bytes.data());
      });
      continue;
    }
    SlotSource& from = slot(source.vault);
    reads(from, bytesOf(move.ranges));
    for (size_t i = 0; i < move.ranges.size(); ++i) {
      const ShardRange& range = move.ranges[i];
      const uint64_t bytes = range.end - range.begin;
      const std::string& name = saved.regions[range.region].name;
      const uint32_t shard = move.group < 0 ? 0 : source.shard;
      local.add(from,
                move.from.empty() ? from.offsetOf(name, shard, range.begin, range.end)
                                  : from.offsetWithin(name, move.from[i], move.from[i] + bytes),
                range);
    }
  }
  local.finish();

  Exchange exchange(transport, message_bytes_);
  for (const Transfer& transfer : transfersOf(plan_, rank_)) {
    if (transfer.receiver == rank_) {
      const Awaited& part = awaited.at(transfer.tag);
      exchange.receive(transfer.sender, transfer.tag, part.bytes, part.take);
      sources_.received_bytes += part.bytes;
      continue;
    }
    const SlotSource& from = slot(transfer.vault);
    const std::vector<SlotSource::Copy> copies =
        transfer.rows ? rowsIn(from, plan_, transfer) : from.partOf(transfer.group, transfer.shard);
    const uint64_t bytes = SlotSource::bytesOf(copies);
    exchange.send(transfer.receiver, transfer.tag, bytes, [&](uint64_t begin, auto into) {
      from.copyInto(partOf(copies, begin, begin + into.size()), into);
    });
    reads(from, bytes);
  }
  exchange.finish();
  for (const Decoding& decoding : decodings) {
    decoding.run(writing);
  }
  compareDigests(plan_, saved, decoded, writing);
  writing.finish();
  return written;
}

}  // namespace reft
