#include "snapshot/vault/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "intercept/base/error.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/span_log.h"

namespace reft {

namespace {

// Whether a file never had a name. Not by its seals: a file on tmpfs has some, too, and may have
// lost its name since.
bool isMemfd(int fd) {
  static constexpr std::string_view kPrefix = "/memfd:";
  std::array<char, kPrefix.size()> begin{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t got = ::readlink(link.c_str(), begin.data(), begin.size());
  return got < 0 || std::string_view(begin.data(), static_cast<size_t>(got)) == kPrefix;
}

// The superblock of a vault, and its length in `bytes`. It is read, not mapped: a foreign file may
// be cut off at any time.
Superblock superblockOf(int fd, uint64_t& bytes) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw SystemError("fstat of a vault");
  }
  if (!S_ISREG(info.st_mode)) {
    throw Corruption("vault: not a regular file or memfd");
  }
  // A memfd that can shrink would let its writer kill every reader with SIGBUS. Files under
  // REFT_VAULT_DIR have no such seal.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && info.st_nlink == 0 && (seals & F_SEAL_SHRINK) == 0 && isMemfd(fd)) {
    throw Corruption("vault: a memfd that is not sealed against shrinking");
  }
  bytes = static_cast<uint64_t>(info.st_size);
  Superblock block;
  const ssize_t got =
      bytes < 2 * kPage ? 0 : ::pread(fd, static_cast<void*>(&block), sizeof(block), 0);
  if (got < 0) {
    throw SystemError("reading a vault");
  }
  if (static_cast<size_t>(got) < sizeof(block)) {
    throw Corruption("vault: " + std::to_string(bytes) + " bytes, shorter than a superblock");
  }
  if (block.magic != kVaultMagic) {
    throw Corruption("vault: not a vault of reft (magic)");
  }
  if (block.version != kVaultVersion) {
    throw Corruption("vault: format version " + std::to_string(block.version) +
                     ", this build reads version " + std::to_string(kVaultVersion) +
                     "; use the reft that wrote it, or delete the file");
  }
  if (block.check != checkOf(block)) {
    throw Corruption("vault: checksum of the superblock does not match");
  }
  if (block.slots < 1 || block.slots > kMaxSlots || block.world < 1 || block.rank < 0 ||
      block.rank >= block.world || block.stats_offset != kPage ||
      block.op_log_offset != 2 * kPage || block.op_log_bytes > bytes ||
      block.op_log_offset > bytes - block.op_log_bytes || block.op_log_bytes % kPage != 0 ||
      block.span_log_offset != block.op_log_offset + block.op_log_bytes ||
      block.span_log_bytes < SpanLog::areaBytes(kSpanRecords) || block.span_log_bytes > bytes ||
      block.span_log_offset > bytes - block.span_log_bytes) {
    throw Corruption("vault: the superblock does not fit its " + std::to_string(bytes) +
                     " bytes (truncated?)");
  }
  block.job[sizeof(block.job) - 1] = '\0';
  return block;
}

}  // namespace

VaultReader::VaultReader(int fd) {
  fd_.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!fd_) {
    throw SystemError("duplicating a vault's descriptor");
  }
  uint64_t bytes = 0;
  const Superblock block = superblockOf(fd_.get(), bytes);
  mapping_ = Mapping(fd_.get(), 0, bytes, false);
  identity_ = {block.job, block.rank, block.world};
  slots_ = block.slots;
  stats_offset_ = block.stats_offset;
  op_log_offset_ = block.op_log_offset;
  op_log_bytes_ = block.op_log_bytes;
  span_log_offset_ = block.span_log_offset;
  span_log_bytes_ = block.span_log_bytes;
}

VaultIdentity VaultReader::identityOf(int fd) {
  uint64_t bytes = 0;
  const Superblock block = superblockOf(fd, bytes);
  return {block.job, block.rank, block.world};
}

const RankStats& VaultReader::stats() const {
  return *reinterpret_cast<const RankStats*>(mapping_.data() + stats_offset_);
}
const void* VaultReader::opLogArea() const {
  return mapping_.data() + op_log_offset_;
}
uint64_t VaultReader::opLogBytes() const {
  return op_log_bytes_;
}
const void* VaultReader::spanLogArea() const {
  return mapping_.data() + span_log_offset_;
}
uint64_t VaultReader::spanLogBytes() const {
  return span_log_bytes_;
}

void VaultReader::refresh() {
  const uint64_t bytes = fileBytes(fd_.get());
  if (bytes < mapping_.bytes()) {  // a vault only grows
    throw Corruption("vault: truncated to " + std::to_string(bytes) + " bytes");
  }
  if (bytes != mapping_.bytes()) {
    mapping_ = Mapping(fd_.get(), 0, bytes, false);
  }
}

std::optional<SlotExtent> VaultReader::extent(uint32_t index) const {
  SlotExtent extent;  // a copy: the writer may replace it at any time
  if (index >= slots_) {
    return std::nullopt;
  }
  std::memcpy(&extent, mapping_.data() + offsetof(Superblock, extents) + index * sizeof(SlotExtent),
              sizeof(extent));
  if (!isValid(extent, index, fixedBytes(), mapping_.bytes())) {
    return std::nullopt;
  }
  return extent;
}

const SlotHeader* VaultReader::header(uint32_t index) const {
  const auto found = extent(index);
  return found ? reinterpret_cast<const SlotHeader*>(mapping_.data() + found->offset) : nullptr;
}

std::optional<SlotView> VaultReader::view(uint32_t index, SlotState state) const {
  const auto extent = this->extent(index);
  if (!extent) {
    return std::nullopt;
  }
  const auto* live = reinterpret_cast<const SlotHeader*>(mapping_.data() + extent->offset);
  if (live->state.load(std::memory_order_acquire) != static_cast<uint32_t>(state)) {
    return std::nullopt;
  }
  alignas(SlotHeader) char copy[sizeof(SlotHeader)];
  std::memcpy(copy, static_cast<const void*>(live), sizeof(copy));
  const auto& head = *reinterpret_cast<const SlotHeader*>(copy);
  const auto fits = [&](uint64_t offset, uint64_t bytes) {
    return bytes <= extent->bytes && offset <= extent->bytes - bytes;
  };
  const bool sealed = state == SlotState::kSealed;
  if (head.magic != kSlotMagic || head.version != kVaultVersion ||
      (sealed ? head.check != checkOf(head) : head.step < 0) ||
      !fits(head.table_offset, head.table_bytes) ||
      !fits(head.objects_offset, head.objects_bytes) ||
      !fits(head.payload_offset, head.payload_bytes) ||
      head.chunk_count > extent->bytes / sizeof(uint64_t) ||
      !fits(head.chunk_hashes_offset, head.chunk_count * sizeof(uint64_t)) ||
      head.chunk_bytes == 0 ||
      head.payload_bytes / head.chunk_bytes + (head.payload_bytes % head.chunk_bytes != 0) !=
          head.chunk_count ||
      (sealed && head.group_count > kMaxGroupDigests) ||
      head.chunk_hashes_offset % alignof(uint64_t) != 0) {
    return std::nullopt;
  }
  SlotView view;
  view.index = index;
  view.state = state;
  view.step = head.step;
  view.incarnation = head.incarnation;
  view.generation = head.generation.load(std::memory_order_relaxed);
  view.sealed_ns = head.sealed_ns;
  view.cut = head.cut;
  view.payload_bytes = head.payload_bytes;
  view.chunk_bytes = head.chunk_bytes;
  view.chunk_count = head.chunk_count;
  view.object_bytes = head.objects_bytes;
  view.table_bytes = head.table_bytes;
  if (sealed) {
    view.group_digests.assign(head.group_digests, head.group_digests + head.group_count);
  }
  view.table_at = extent->offset + head.table_offset;
  view.objects_at = extent->offset + head.objects_offset;
  view.chunk_hashes_at = extent->offset + head.chunk_hashes_offset;
  view.payload_at = extent->offset + head.payload_offset;
  view.table_hash = head.table_hash;
  view.objects_hash = head.objects_hash;
  if (hashBytes(mapping_.data() + view.table_at, view.table_bytes) != view.table_hash) {
    return std::nullopt;
  }
  if (hashBytes(mapping_.data() + view.objects_at, view.object_bytes) != view.objects_hash) {
    if (sealed) {
      return std::nullopt;
    }
    view.object_bytes = 0;
    view.objects_hash = hashBytes(nullptr, 0);
  }
  return isUnchanged(view) ? std::optional(std::move(view)) : std::nullopt;
}

std::vector<SlotView> VaultReader::slots() const {
  return views(SlotState::kSealed);
}

std::vector<SlotView> VaultReader::unfinishedSlots() const {
  return views(SlotState::kWriting);
}

std::vector<SlotView> VaultReader::views(SlotState state) const {
  std::vector<SlotView> result;
  for (uint32_t i = 0; i < slots_; ++i) {
    if (auto found = view(i, state)) {
      result.push_back(std::move(*found));
    }
  }
  return result;
}

std::vector<RawSlot> VaultReader::rawSlots() const {
  std::vector<RawSlot> result;
  for (uint32_t i = 0; i < slots_; ++i) {
    if (const SlotHeader* head = header(i)) {
      const uint32_t state =
          std::min(head->state.load(), static_cast<uint32_t>(SlotState::kSealed));
      result.push_back({static_cast<SlotState>(state), head->step, head->incarnation, head->cut,
                        head->replicas, head->proposal, head->plan_anew != 0});
    }
  }
  return result;
}

SnapshotTable VaultReader::table(const SlotView& slot) const {
  const std::string copy(reinterpret_cast<const char*>(mapping_.data()) + slot.table_at,
                         slot.table_bytes);
  if (hashBytes(copy.data(), copy.size()) != slot.table_hash) {
    throw Corruption("vault: checksum of the table of step " + std::to_string(slot.step) +
                     " does not match");
  }
  SnapshotTable table = SnapshotTable::fromJson(copy);
  if (table.payload_bytes != slot.payload_bytes || table.chunk_bytes != slot.chunk_bytes) {
    throw Corruption("vault: table and slot disagree about the payload");
  }
  return table;
}

std::string VaultReader::objects(const SlotView& slot) const {
  std::string copy(reinterpret_cast<const char*>(mapping_.data()) + slot.objects_at,
                   slot.object_bytes);
  if (hashBytes(copy.data(), copy.size()) != slot.objects_hash) {
    throw Corruption("vault: checksum of the small state of step " + std::to_string(slot.step) +
                     " does not match");
  }
  return copy;
}

const std::byte* VaultReader::payload(const SlotView& slot) const {
  return mapping_.data() + slot.payload_at;
}

std::vector<ChunkFault> VaultReader::verify(const SlotView& slot, uint64_t begin,
                                            uint64_t end) const {
  std::vector<ChunkFault> faults;
  end = std::min(end, slot.payload_bytes);
  if (begin >= end) {
    return faults;
  }
  const uint64_t last = (end - 1) / slot.chunk_bytes;
  for (uint64_t chunk = begin / slot.chunk_bytes; chunk <= last; ++chunk) {
    const uint64_t offset = chunk * slot.chunk_bytes;
    const uint64_t bytes = std::min(slot.chunk_bytes, slot.payload_bytes - offset);
    const uint64_t expected = hashOf(slot, chunk);
    const uint64_t found = hashBytes(payload(slot) + offset, bytes);
    if (found != expected) {
      faults.push_back({offset, expected, found});
    }
  }
  return faults;
}

uint64_t VaultReader::hashOf(const SlotView& slot, uint64_t chunk) const {
  return reinterpret_cast<const uint64_t*>(mapping_.data() + slot.chunk_hashes_at)[chunk];
}

bool VaultReader::isUnchanged(const SlotView& slot) const {
  std::atomic_thread_fence(
      std::memory_order_acquire);  // what was read before was read before the loads below
  const SlotHeader* head = header(slot.index);
  return head != nullptr && head->generation.load(std::memory_order_acquire) == slot.generation &&
         head->state.load(std::memory_order_acquire) == static_cast<uint32_t>(slot.state);
}

}  // namespace reft
