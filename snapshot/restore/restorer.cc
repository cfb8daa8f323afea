#include "snapshot/restore/restorer.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <set>

#include "intercept/base/error.h"

namespace reft {

namespace {

// Messages that a rank has under way at a time.
constexpr size_t kInFlight = 16;
constexpr uint64_t kInFlightBytes = uint64_t{256} << 20;

uint64_t bytesOf(const std::vector<ShardRange>& ranges) {
  return std::accumulate(
      ranges.begin(), ranges.end(), uint64_t{0},
      [](uint64_t sum, const ShardRange& range) { return sum + range.end - range.begin; });
}

std::string describe(const std::string& dtype, const std::vector<int64_t>& shape) {
  std::string text = dtype + " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

using Buffer = std::unique_ptr<std::byte[]>;

Buffer bufferOf(uint64_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

}  // namespace

// Live regions by the names of the owner's table.
class Restorer::Writing {
 public:
  Writing(const SnapshotTable& table, const std::vector<LiveRegion>& live, const Upload& upload)
      : live_(live), upload_(upload) {
    std::map<std::string, size_t> by_name;
    for (size_t i = 0; i < live.size(); ++i) {
      by_name.emplace(live[i].name, i);
    }
    for (const RegionInfo& region : table.regions) {
      const auto at = by_name.find(region.name);
      if (at == by_name.end() || live[at->second].bytes != region.bytes) {
        throw InvalidArgument("live region " + region.name, "absent or of another size",
                              "the regions of the snapshot");
      }
      live_of_.push_back(at->second);
    }
  }

  // nullptr: on a device.
  std::byte* hostAddress(const ShardRange& range) const {
    std::byte* const memory = live_[live_of_[range.region]].memory;
    return memory == nullptr ? nullptr : memory + range.begin;
  }
  void upload(const ShardRange& range, const std::byte* bytes) const {
    upload_(live_of_[range.region], range.begin, {bytes, range.end - range.begin});
  }
  // Writes ranges whose bytes follow each other in `bytes`.
  void scatter(const std::vector<ShardRange>& ranges, const std::byte* bytes) const {
    for (const ShardRange& range : ranges) {
      if (std::byte* const to = hostAddress(range)) {
        std::memcpy(to, bytes, range.end - range.begin);
      } else {
        upload(range, bytes);
      }
      bytes += range.end - range.begin;
    }
  }

 private:
  const std::vector<LiveRegion>& live_;
  const Upload& upload_;
  std::vector<size_t> live_of_;  // by region of the owner's table
};

Restorer::Restorer(RestorePlan plan, int rank, OpenVault open)
    : plan_(std::move(plan)), rank_(rank), owner_(plan_.ownerFor(rank)), open_(std::move(open)) {}

SlotSource& Restorer::slot(int vault) {
  std::unique_ptr<SlotSource>& slot = slots_[vault];
  if (slot == nullptr) {
    const UniqueFd fd = open_(vault);
    slot = std::make_unique<SlotSource>(fd.get(), plan_.vaults.at(static_cast<size_t>(vault)).slot,
                                        plan_.step, plan_.incarnation);
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
  for (const RegionInfo& saved : table().regions) {
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
  const SnapshotTable& saved = table();
  const Writing writing(saved, live, upload);
  const std::vector<Move> moves = movesOf(plan_, rank_, saved);
  uint64_t written = 0, saved_bytes = 0;
  for (const Move& move : moves) {
    written += bytesOf(move.ranges);
  }
  for (const RegionInfo& region : saved.regions) {
    saved_bytes += region.bytes;
  }
  if (written != saved_bytes) {  // before a byte is written
    throw Corruption("the plan restores " + std::to_string(written) + " of " +
                     std::to_string(saved_bytes) + " bytes");
  }

  // From vaults of this node, each read once from front to back.
  struct Staged {
    const ShardRange* range;
    Buffer bytes;
  };
  std::map<int, std::pair<std::vector<SlotSource::Copy>, std::vector<Staged>>> local;
  std::map<uint32_t, const Move*> received;  // by tag
  for (const Move& move : moves) {
    const MoveSource& source = move.sources.front();  // kCopy has one
    if (source.kind == MoveSource::Kind::kPeer) {
      received.emplace(source.tag, &move);
      continue;
    }
    SlotSource& from = slot(source.vault);
    auto& [copies, staged] = local[source.vault];
    for (const ShardRange& range : move.ranges) {
      std::byte* to = writing.hostAddress(range);
      if (to == nullptr) {
        staged.push_back({&range, bufferOf(range.end - range.begin)});
        to = staged.back().bytes.get();
      }
      copies.push_back(
          {from.offsetOf(saved.regions[range.region].name, source.shard, range.begin, range.end),
           range.end - range.begin, to});
    }
  }
  for (auto& [vault, work] : local) {
    slot(vault).copy(std::move(work.first));
    for (const Staged& staged : work.second) {
      writing.upload(*staged.range, staged.bytes.get());
    }
    work.second.clear();
  }

  // Between nodes. Every rank posts in the order of transfersOf() and waits for its oldest message,
  // so the first one that is not done is always posted on both sides.
  struct Flight {
    std::unique_ptr<PeerTransport::Pending> pending;
    Buffer buffer;
    uint64_t bytes;
    const Move* move;  // nullptr: a send
  };
  std::deque<Flight> flights;
  uint64_t in_flight = 0;
  const auto landOldest = [&] {
    Flight& oldest = flights.front();
    oldest.pending->wait();
    if (oldest.move != nullptr) {
      writing.scatter(oldest.move->ranges, oldest.buffer.get());
    }
    in_flight -= oldest.bytes;
    flights.pop_front();
  };
  for (const Transfer& transfer : transfersOf(plan_, rank_)) {
    const bool sends = transfer.sender == rank_;
    const Move* move = sends ? nullptr : received.at(transfer.tag);
    SlotSource* from = sends ? &slot(transfer.vault) : nullptr;
    const std::vector<ShardRange> ranges =
        sends ? rangesOf(from->table(), transfer.group, transfer.shard) : move->ranges;
    const uint64_t bytes = bytesOf(ranges);
    if (bytes == 0) {
      continue;
    }
    if (transport == nullptr) {
      throw Unavailable("parts of the snapshot lie on other nodes, and there is no transport");
    }
    while (!flights.empty() &&
           (flights.size() >= kInFlight || in_flight + bytes > kInFlightBytes)) {
      landOldest();
    }
    Flight flight{nullptr, bufferOf(bytes), bytes, move};
    if (sends) {
      std::vector<SlotSource::Copy> copies;
      std::byte* to = flight.buffer.get();
      for (const ShardRange& range : ranges) {
        copies.push_back({from->offsetOf(from->table().regions[range.region].name, transfer.shard,
                                         range.begin, range.end),
                          range.end - range.begin, to});
        to += range.end - range.begin;
      }
      from->copy(std::move(copies));
      flight.pending =
          transport->send({flight.buffer.get(), bytes}, transfer.receiver, transfer.tag);
    } else {
      flight.pending =
          transport->receive({flight.buffer.get(), bytes}, transfer.sender, transfer.tag);
    }
    in_flight += bytes;
    flights.push_back(std::move(flight));
  }
  while (!flights.empty()) {
    landOldest();
  }
  return written;
}

}  // namespace reft
