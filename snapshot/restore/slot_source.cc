#include "snapshot/restore/slot_source.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include <linux/magic.h>
#include <sys/vfs.h>

#include "intercept/base/error.h"
#include "snapshot/restore/plan.h"
#include "snapshot/vault/copy.h"

namespace reft {

namespace {

bool liesOnStorage(int fd) {
  struct statfs found {};
  return ::fstatfs(fd, &found) == 0 && found.f_type != TMPFS_MAGIC && found.f_type != RAMFS_MAGIC;
}

}  // namespace

SlotSource::SlotSource(int fd, uint32_t slot, int64_t step, uint64_t incarnation)
    : reader_(fd), on_storage_(liesOnStorage(fd)) {
  const std::vector<SlotView> views = reader_.slots();
  const auto found = std::find_if(views.begin(), views.end(), [&](const SlotView& view) {
    return view.index == slot && view.step == step && view.incarnation == incarnation;
  });
  if (found == views.end()) {
    throw Corruption("slot " + std::to_string(slot) + " of rank " +
                     std::to_string(reader_.identity().rank) + " no longer holds step " +
                     std::to_string(step));
  }
  view_ = *found;
  table_ = reader_.table(view_);
  findOffsets();
}

SlotSource::SlotSource(int fd, SlotView view)
    : reader_(fd),
      on_storage_(liesOnStorage(fd)),
      view_(std::move(view)),
      table_(reader_.table(view_)) {
  findOffsets();
}

std::unique_ptr<SlotSource> SlotSource::after(int fd, int64_t step, uint64_t incarnation) {
  try {
    const VaultReader reader(fd);
    std::vector<SlotView> views = reader.slots();
    std::ranges::move(reader.unfinishedSlots(), std::back_inserter(views));
    const SlotView* first = nullptr;
    for (const SlotView& view : views) {
      if (view.step > step && view.incarnation == incarnation &&
          (first == nullptr || view.step < first->step)) {
        first = &view;
      }
    }
    return first == nullptr ? nullptr : std::unique_ptr<SlotSource>(new SlotSource(fd, *first));
  } catch (const Corruption&) {
    return nullptr;
  }
}

void SlotSource::findOffsets() {
  for (const Piece& piece : table_.pieces) {
    offsets_.emplace(Place(table_.regions[piece.region].name, piece.shard, piece.begin, piece.end),
                     piece.payload_offset);
  }
}

uint64_t SlotSource::offsetOf(const std::string& region, uint32_t shard, uint64_t begin,
                              uint64_t end) const {
  const auto at = offsets_.find(Place(region, shard, begin, end));
  if (at == offsets_.end()) {
    throw Corruption(where() + "bytes " + std::to_string(begin) + " to " + std::to_string(end) +
                     " of " + region + " are not stored as part of shard " + std::to_string(shard));
  }
  return at->second;
}

uint64_t SlotSource::offsetWithin(const std::string& region, uint64_t begin, uint64_t end) const {
  // A private region is one piece.
  const auto after = offsets_.lower_bound(Place(region, 0, 0, end));
  if (after == offsets_.end() || std::get<0>(after->first) != region ||
      std::get<1>(after->first) != 0 || std::get<2>(after->first) != 0 || begin > end) {
    throw Corruption(where() + "bytes " + std::to_string(begin) + " to " + std::to_string(end) +
                     " of " + region + " are not stored");
  }
  return after->second + begin;
}

std::vector<SlotSource::Copy> SlotSource::findPart(const std::string& group, uint32_t part) const {
  std::vector<Copy> copies;
  uint64_t at = 0;
  for (const ShardRange& range : rangesOf(table_, group, part)) {
    const uint64_t bytes = range.end - range.begin;
    const uint32_t shard = group.empty() ? 0 : part;
    copies.push_back({offsetOf(table_.regions[range.region].name, shard, range.begin, range.end),
                      bytes, nullptr, at});
    at += bytes;
  }
  for (size_t g = 0; g < table_.groups.size(); ++g) {
    const auto index = static_cast<int32_t>(g);
    if (table_.groups[g].id != group || part != table_.parityPart(index)) {
      continue;
    }
    if (!table_.holdsParityOf(index)) {
      throw Corruption(where() + "the parity of group " + group + " is not stored");
    }
    for (const ParityPiece& piece : table_.parities) {
      if (piece.group == g) {
        copies.push_back({piece.payload_offset, piece.end - piece.begin, nullptr, piece.begin});
      }
    }
  }
  return copies;
}

const std::vector<SlotSource::Copy>& SlotSource::partOf(const std::string& group,
                                                        uint32_t part) const {
  const auto [at, is_new] = parts_.try_emplace({group, part});
  if (is_new) {
    at->second = findPart(group, part);
  }
  return at->second;
}

uint64_t SlotSource::bytesOf(const std::vector<Copy>& copies) {
  return std::accumulate(copies.begin(), copies.end(), uint64_t{0},
                         [](uint64_t sum, const Copy& copy) { return sum + copy.bytes; });
}

uint64_t SlotSource::bytesOf(const std::string& group, uint32_t part) const {
  return bytesOf(partOf(group, part));
}

void SlotSource::copyPart(const std::string& group, uint32_t part, std::span<std::byte> to) const {
  checkLength(group, part, to.size());
  copyInto(partOf(group, part), to);
}

void SlotSource::copyInto(std::vector<Copy> copies, std::span<std::byte> to) const {
  for (Copy& copy : copies) {
    copy.to = to.data() + copy.at;
  }
  copy(std::move(copies));
}

void SlotSource::copy(std::vector<Copy> copies) const {
  for (const Copy& copy : copies) {
    if (copy.from > view_.payload_bytes || copy.bytes > view_.payload_bytes - copy.from) {
      throw InvalidArgument("payload range",
                            std::to_string(copy.from) + " + " + std::to_string(copy.bytes),
                            "ranges within " + std::to_string(view_.payload_bytes) + " bytes");
    }
  }
  std::sort(copies.begin(), copies.end(),
            [](const Copy& a, const Copy& b) { return a.from < b.from; });
  const std::byte* payload = reader_.payload(view_);
  ChunkHasher hasher;
  size_t first = 0;
  const uint64_t first_chunk = copies.empty() ? 0 : copies.front().from / view_.chunk_bytes;
  for (uint64_t chunk = first_chunk; chunk < view_.chunk_count; ++chunk) {
    const uint64_t begin = chunk * view_.chunk_bytes;
    const uint64_t end = begin + view_.chunk_bytes;
    while (first < copies.size() && copies[first].from + copies[first].bytes <= begin) {
      ++first;
    }
    if (first == copies.size()) {
      break;
    }
    if (copies[first].from >= end) {
      continue;
    }
    // Hashed and copied in one pass over the memory.
    const uint64_t filled = std::min(end, view_.payload_bytes);
    hasher.reset();
    uint64_t at = begin;
    for (size_t i = first; i < copies.size() && copies[i].from < end; ++i) {
      const uint64_t a = std::max(copies[i].from, begin);
      const uint64_t b = std::min(copies[i].from + copies[i].bytes, end);
      if (b <= a) {  // it ended in a chunk before
        continue;
      }
      std::byte* const to = copies[i].to + (a - copies[i].from);
      if (a < at) {  // twice
        std::memcpy(to, payload + a, b - a);
        continue;
      }
      hasher.hash(payload + at, a - at);
      hasher.copy(to, payload + a, b - a);
      at = b;
    }
    hasher.hash(payload + at, filled - at);
    if (hasher.digest() != reader_.hashOf(view_, chunk)) {
      throwDamaged(chunk);
    }
  }
  checkUnchanged();
}

void SlotSource::visitPart(
    const std::string& group, uint32_t part, uint64_t bytes,
    const std::function<void(uint64_t at, std::span<const std::byte> bytes)>& fn) const {
  checkLength(group, part, bytes);
  std::vector<Copy> pieces = partOf(group, part);
  std::sort(pieces.begin(), pieces.end(),
            [](const Copy& a, const Copy& b) { return a.from < b.from; });
  const std::byte* payload = reader_.payload(view_);
  uint64_t checked = UINT64_MAX;
  for (const Copy& piece : pieces) {
    const uint64_t end = piece.from + piece.bytes;
    for (uint64_t at = piece.from; at < end;) {
      const uint64_t chunk = at / view_.chunk_bytes;
      if (chunk != checked && !reader_.verify(view_, at, at + 1).empty()) {
        throwDamaged(chunk);
      }
      checked = chunk;
      const uint64_t until = std::min(end, (chunk + 1) * view_.chunk_bytes);
      fn(piece.at + (at - piece.from), {payload + at, until - at});
      at = until;
    }
  }
  checkUnchanged();
}

void SlotSource::checkLength(const std::string& group, uint32_t part, uint64_t bytes) const {
  if (const uint64_t stored = bytesOf(group, part); stored != bytes) {
    throw Corruption(where() + "part " + std::to_string(part) + " of group " + group + " has " +
                     std::to_string(stored) + " bytes, not " + std::to_string(bytes));
  }
}

std::string SlotSource::where() const {
  return "rank " + std::to_string(reader_.identity().rank) + " step " + std::to_string(view_.step) +
         ": ";
}

void SlotSource::throwDamaged(uint64_t chunk) const {
  throw Corruption("step " + std::to_string(view_.step) + " of rank " +
                   std::to_string(reader_.identity().rank) +
                   ": checksum of the bytes at payload offset " +
                   std::to_string(chunk * view_.chunk_bytes) + " does not match");
}

void SlotSource::checkUnchanged() const {
  if (!reader_.isUnchanged(view_)) {
    throw Corruption("step " + std::to_string(view_.step) + " of rank " +
                     std::to_string(reader_.identity().rank) +
                     ": its slot was overwritten while it was read");
  }
}

}  // namespace reft
