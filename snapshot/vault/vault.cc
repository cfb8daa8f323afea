#include "snapshot/vault/vault.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include <xxhash.h>

#include "intercept/base/error.h"
#include "intercept/record/op_log.h"
#include "snapshot/vault/hash_avx2.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace reft {

namespace {

uint64_t alignUp(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

uint64_t extentCheck(const SlotExtent& extent, uint32_t index) {
  const uint64_t fields[3] = {extent.offset, extent.bytes, index};
  return hashBytes(fields, sizeof(fields), kSlotMagic);
}

// Whether the extent is whole and lies between the fixed part and the end of the file.
bool validExtent(const SlotExtent& extent, uint32_t index, uint64_t fixed_bytes,
                 uint64_t file_bytes) {
  return extent.check == extentCheck(extent, index) && extent.offset >= fixed_bytes &&
         extent.offset % kPage == 0 && extent.bytes >= kPage && extent.bytes <= file_bytes &&
         extent.offset <= file_bytes - extent.bytes;
}

uint64_t superblockCheck(const Superblock& block) {
  return hashBytes(&block, offsetof(Superblock, check));
}

uint64_t slotCheck(const SlotHeader& header) {
  alignas(SlotHeader) char copy[sizeof(SlotHeader)];
  std::memcpy(copy, static_cast<const void*>(&header), sizeof(copy));
  std::memset(copy + offsetof(SlotHeader, state), 0, sizeof(header.state));
  std::memset(copy + offsetof(SlotHeader, check), 0, sizeof(header.check));
  return hashBytes(copy, sizeof(copy));
}

uint64_t fileBytes(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw SystemError("fstat of a vault");
  }
  return static_cast<uint64_t>(info.st_size);
}

// Touches every page of a mapping of `fd` at `offset`, so that the first snapshot does not pay for
// it.
void populate(int fd, uint64_t offset, std::byte* data, uint64_t bytes) {
  if (::madvise(data, bytes, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  const std::string what = "taking " + std::to_string(bytes) + " bytes for the vault";
  if (errno == ENOMEM || errno == EFAULT || errno == ENOSPC) {
    throw SystemError(
        what, errno == EFAULT ? ENOSPC : errno);  // EFAULT: the file system had no page to give
  }
  // Kernels before 5.14. Touching a page that cannot be had would kill the process, so all are
  // allocated first.
  if (const int failed =
          ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
      failed != 0) {
    throw SystemError(what, failed);
  }
  for (uint64_t at = 0; at < bytes; at += kPage) {
    auto* byte = reinterpret_cast<volatile std::byte*>(data + at);
    *byte = *byte;
  }
}

}  // namespace

uint64_t hashBytes(const void* data, size_t bytes, uint64_t seed) {
  return bytes > kPage && avx2::available() ? avx2::hash(data, bytes, seed)
                                            : XXH3_64bits_withSeed(data, bytes, seed);
}

Mapping::Mapping(int fd, uint64_t offset, uint64_t bytes, bool writable) : bytes_(bytes) {
  void* address = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                         fd, static_cast<off_t>(offset));
  if (address == MAP_FAILED) {
    throw SystemError("mapping " + std::to_string(bytes) + " bytes of a vault");
  }
  data_ = static_cast<std::byte*>(address);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
}

std::unique_ptr<Vault> Vault::create(const VaultIdentity& identity, uint32_t slots,
                                     uint32_t op_log_records, const std::string& path) {
  if (slots < 1 || slots > kMaxSlots) {
    throw InvalidArgument("slots", std::to_string(slots), "1.." + std::to_string(kMaxSlots));
  }
  Superblock block{};
  if (identity.job.size() >= sizeof(block.job)) {
    throw InvalidArgument("job id", "'" + identity.job + "'", "at most 127 bytes");
  }
  std::unique_ptr<Vault> vault(new Vault);
  std::string temporary;
  if (path.empty()) {
    vault->fd_.reset(::memfd_create(("reft-vault-" + std::to_string(identity.rank)).c_str(),
                                    MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!vault->fd_) {
      throw SystemError("memfd_create for the vault");
    }
  } else {
    // Under another name until it is complete: a reader never sees half a superblock.
    temporary = path + ".new";
    ::unlink(temporary.c_str());
    vault->fd_.reset(
        ::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!vault->fd_) {
      throw SystemError("creating the vault " + temporary);
    }
  }
  block.version = kVaultVersion;
  block.slots = slots;
  block.rank = identity.rank;
  block.world = identity.world;
  block.stats_offset = kPage;
  block.op_log_offset = 2 * kPage;
  block.op_log_bytes = alignUp(OpLog::areaBytes(op_log_records), kPage);
  block.span_log_offset = block.op_log_offset + block.op_log_bytes;
  block.span_log_bytes = alignUp(SpanLog::areaBytes(kSpanRecords), kPage);
  std::memcpy(block.job, identity.job.data(), identity.job.size());
  block.magic = kVaultMagic;
  block.check = superblockCheck(block);
  const uint64_t bytes = block.span_log_offset + block.span_log_bytes;
  if (::ftruncate(vault->fd_.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError("sizing the vault to " + std::to_string(bytes) + " bytes");
  }
  if (path.empty() && ::fcntl(vault->fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    throw SystemError("sealing the vault");
  }
  vault->fixed_ = Mapping(vault->fd_.get(), 0, bytes, true);
  populate(vault->fd_.get(), 0, vault->fixed_.data(), bytes);
  std::memcpy(static_cast<void*>(vault->superblock()), &block, sizeof(block));
  vault->span_log_ =
      std::make_unique<SpanLog>(vault->fixed_.data() + block.span_log_offset, kSpanRecords);
  if (!temporary.empty() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    throw SystemError("renaming the vault to " + path);
  }
  vault->slots_ = slots;
  vault->slot_.resize(slots);
  return vault;
}

std::unique_ptr<Vault> Vault::adopt(UniqueFd fd, const VaultIdentity& identity) {
  const VaultReader reader(fd.get());  // validates
  const VaultIdentity& found = reader.identity();
  if (found.job != identity.job || found.rank != identity.rank || found.world != identity.world) {
    throw Corruption("vault belongs to job '" + found.job + "' rank " + std::to_string(found.rank) +
                     " of " + std::to_string(found.world) + ", not to job '" + identity.job +
                     "' rank " + std::to_string(identity.rank) + " of " +
                     std::to_string(identity.world));
  }
  std::unique_ptr<Vault> vault(new Vault);
  vault->fd_ = std::move(fd);
  vault->slots_ = reader.slots_;
  vault->fixed_ = Mapping(vault->fd_.get(), 0, reader.fixedBytes(), true);
  vault->span_log_ =
      std::make_unique<SpanLog>(vault->fixed_.data() + reader.span_log_offset_, kSpanRecords);
  vault->slot_.resize(vault->slots_);
  const uint64_t length = fileBytes(vault->fd_.get());
  for (uint32_t i = 0; i < vault->slots_; ++i) {
    const SlotExtent extent = vault->superblock()->extents[i];
    if (!validExtent(extent, i, vault->fixed_.bytes(), length)) {
      continue;
    }
    Slot& slot = vault->slot_[i];
    slot.mapping = Mapping(vault->fd_.get(), extent.offset, extent.bytes, true);
    const SlotHeader* header = vault->header(i);
    // Offsets are only meaningful if the header is whole; otherwise the slot is laid out anew by
    // reserveSlot.
    if (header->magic != kSlotMagic || header->table_offset != kPage ||
        header->objects_offset % kPage != 0 || header->chunk_hashes_offset % kPage != 0 ||
        header->payload_offset % kPage != 0 ||
        !(header->table_offset <= header->objects_offset &&
          header->objects_offset <= header->chunk_hashes_offset &&
          header->chunk_hashes_offset <= header->payload_offset &&
          header->payload_offset <= extent.bytes)) {
      continue;
    }
    slot.table_capacity = header->objects_offset - header->table_offset;
    slot.object_capacity = header->chunk_hashes_offset - header->objects_offset;
    slot.chunk_capacity = (header->payload_offset - header->chunk_hashes_offset) / sizeof(uint64_t);
    slot.payload_capacity = extent.bytes - header->payload_offset;
  }
  return vault;
}

Superblock* Vault::superblock() const {
  return reinterpret_cast<Superblock*>(fixed_.data());
}
RankStats& Vault::stats() const {
  return *reinterpret_cast<RankStats*>(fixed_.data() + superblock()->stats_offset);
}
void* Vault::opLogArea() const {
  return fixed_.data() + superblock()->op_log_offset;
}
uint64_t Vault::opLogBytes() const {
  return superblock()->op_log_bytes;
}
uint64_t Vault::bytes() const {
  return fileBytes(fd_.get());
}
SlotHeader* Vault::header(uint32_t index) const {
  return reinterpret_cast<SlotHeader*>(slot_[index].mapping.data());
}
std::byte* Vault::payload(uint32_t index) const {
  return slot_[index].mapping.data() + slot_[index].payloadAt();
}
uint64_t* Vault::chunkHashes(uint32_t index) const {
  return reinterpret_cast<uint64_t*>(slot_[index].mapping.data() + slot_[index].chunkHashesAt());
}
uint64_t Vault::objectCapacity(uint32_t index) const {
  return slot_[index].object_capacity;
}

uint64_t Vault::payloadCapacity(uint32_t index) const {
  return slot_[index].payload_capacity;
}

void Vault::reserveSlot(uint32_t index, uint64_t table_bytes, uint64_t object_bytes,
                        uint64_t chunk_count, uint64_t payload_bytes) {
  Slot& slot = slot_[index];
  if (slot.mapping.data() != nullptr && slot.table_capacity >= table_bytes &&
      slot.object_capacity >= object_bytes && slot.chunk_capacity >= chunk_count &&
      slot.payload_capacity >= payload_bytes) {
    return;
  }
  const uint64_t table_offset = kPage;
  const uint64_t objects_offset =
      table_offset + alignUp(std::max(table_bytes, slot.table_capacity), kPage);
  const uint64_t hashes_offset =
      objects_offset + alignUp(std::max(object_bytes, slot.object_capacity), kPage);
  const uint64_t payload_offset =
      hashes_offset + alignUp(std::max<uint64_t>(chunk_count, 1) * sizeof(uint64_t), kPage);
  SlotExtent extent{};
  extent.bytes = payload_offset + alignUp(std::max<uint64_t>(payload_bytes, 1), kPage);
  SlotExtent& published = superblock()->extents[index];
  const SlotExtent old = published;
  const uint64_t length = fileBytes(fd_.get());
  extent.offset = unused_from_ != 0 ? unused_from_ : alignUp(length, kPage);
  // Address space first, length second: a length that cannot be mapped would lock every reader out.
  Mapping mapping(fd_.get(), extent.offset, extent.bytes, true);
  if (extent.offset + extent.bytes > length &&
      ::ftruncate(fd_.get(), static_cast<off_t>(extent.offset + extent.bytes)) != 0) {
    throw SystemError("growing the vault by " + std::to_string(extent.bytes) + " bytes");
  }
  try {
    populate(fd_.get(), extent.offset, mapping.data(), extent.bytes);
  } catch (...) {
    // Give back what was touched before memory ran out. The length stays (a memfd is sealed against
    // shrinking), for the next attempt to use.
    unused_from_ = extent.offset;
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(extent.offset), static_cast<off_t>(extent.bytes));
    throw;
  }
  auto* header = reinterpret_cast<SlotHeader*>(mapping.data());
  header->magic = kSlotMagic;
  header->version = kVaultVersion;
  header->table_offset = table_offset;
  header->objects_offset = objects_offset;
  header->chunk_hashes_offset = hashes_offset;
  header->payload_offset = payload_offset;
  if (slot.mapping.data() != nullptr) {
    header->generation.store(this->header(index)->generation.load() + 1);
    clearSlot(index);
  }
  extent.check = extentCheck(extent, index);
  published = extent;
  unused_from_ = 0;
  if (before_move_ && slot.mapping.data() != nullptr) {
    before_move_(payload(index));
  }
  slot.mapping = std::move(mapping);
  slot.table_capacity = objects_offset - table_offset;
  slot.object_capacity = hashes_offset - objects_offset;
  slot.chunk_capacity = (payload_offset - hashes_offset) / sizeof(uint64_t);
  slot.payload_capacity = extent.bytes - payload_offset;
  slot.table_hash = 0;
  if (old.offset != 0) {
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(old.offset), static_cast<off_t>(old.bytes));
  }
}

void Vault::beginSlot(uint32_t index, int64_t step, uint64_t incarnation, std::string_view table,
                      uint64_t table_hash, uint64_t chunk_bytes, uint64_t payload_bytes,
                      uint64_t chunk_count) {
  Slot& slot = slot_[index];
  SlotHeader* header = this->header(index);
  header->state.store(static_cast<uint32_t>(SlotState::kWriting), std::memory_order_seq_cst);
  header->generation.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(
      std::memory_order_seq_cst);  // no byte of the new snapshot is seen before the two above
  header->step = step;
  header->incarnation = incarnation;
  header->table_bytes = table.size();
  header->table_hash = table_hash;
  header->chunk_bytes = chunk_bytes;
  header->chunk_count = chunk_count;
  header->payload_bytes = payload_bytes;
  header->objects_bytes = 0;
  header->objects_hash = hashBytes(nullptr, 0);
  if (slot.table_hash != table_hash) {  // the table changes rarely, and can be hundreds of KB
    std::memcpy(slot.mapping.data() + kPage, table.data(), table.size());
    slot.table_hash = table_hash;
  }
}

bool Vault::putObjects(uint32_t index, std::string_view objects) {
  if (objects.size() > slot_[index].object_capacity) {
    return false;
  }
  SlotHeader* header = this->header(index);
  std::memcpy(slot_[index].mapping.data() + slot_[index].objectsAt(), objects.data(),
              objects.size());
  header->objects_bytes = objects.size();
  header->objects_hash = hashBytes(objects.data(), objects.size());
  return true;
}

void Vault::putObjectPart(uint32_t index, uint64_t offset, std::span<const std::byte> bytes) {
  const Slot& slot = slot_[index];
  if (offset <= slot.object_capacity && bytes.size() <= slot.object_capacity - offset) {
    std::memcpy(slot.mapping.data() + slot.objectsAt() + offset, bytes.data(), bytes.size());
  }
}

void Vault::hashObjects(uint32_t index, uint64_t bytes) {
  const Slot& slot = slot_[index];
  header(index)->objects_hash =
      hashBytes(slot.mapping.data() + slot.objectsAt(), std::min(bytes, slot.object_capacity));
}

void Vault::setBallot(uint32_t index, uint64_t cut, uint8_t wish) {
  header(index)->cut = cut;
  header(index)->wish = wish;
}

void Vault::sealSlot(uint32_t index, std::span<const uint64_t> group_digests, int64_t now_ns) {
  SlotHeader* header = this->header(index);
  header->group_count =
      static_cast<uint32_t>(std::min<size_t>(group_digests.size(), kMaxGroupDigests));
  std::memset(header->group_digests, 0, sizeof(header->group_digests));
  std::copy_n(group_digests.begin(), header->group_count, header->group_digests);
  header->sealed_ns = now_ns;
  header->check = slotCheck(*header);
  header->state.store(static_cast<uint32_t>(SlotState::kSealed), std::memory_order_release);
}

void Vault::clearSlot(uint32_t index) {
  if (slot_[index].mapping.data() != nullptr) {
    header(index)->state.store(static_cast<uint32_t>(SlotState::kEmpty), std::memory_order_seq_cst);
  }
}

VaultReader::VaultReader(int fd) {
  fd_.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!fd_) {
    throw SystemError("duplicating a vault's descriptor");
  }
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) {
    throw SystemError("fstat of a vault");
  }
  if (!S_ISREG(info.st_mode)) {
    throw Corruption("vault: not a regular file or memfd");
  }
  // A memfd that can shrink would let its writer kill every reader with SIGBUS. Files under
  // REFT_VAULT_DIR have no seals.
  const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
  if (seals >= 0 && info.st_nlink == 0 && (seals & F_SEAL_SHRINK) == 0) {
    throw Corruption("vault: a memfd that is not sealed against shrinking");
  }
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < 2 * kPage) {
    throw Corruption("vault: " + std::to_string(bytes) + " bytes, shorter than a superblock");
  }
  mapping_ = Mapping(fd_.get(), 0, bytes, false);
  Superblock block;
  std::memcpy(static_cast<void*>(&block), mapping_.data(), sizeof(block));
  if (block.magic != kVaultMagic) {
    throw Corruption("vault: not a vault of reft (magic)");
  }
  if (block.version != kVaultVersion) {
    throw Corruption("vault: format version " + std::to_string(block.version) +
                     ", this build reads version " + std::to_string(kVaultVersion) +
                     "; use the reft that wrote it, or delete the file");
  }
  if (block.check != superblockCheck(block)) {
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
  identity_ = {block.job, block.rank, block.world};
  slots_ = block.slots;
  stats_offset_ = block.stats_offset;
  op_log_offset_ = block.op_log_offset;
  op_log_bytes_ = block.op_log_bytes;
  span_log_offset_ = block.span_log_offset;
  span_log_bytes_ = block.span_log_bytes;
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
  if (!validExtent(extent, index, fixedBytes(), mapping_.bytes())) {
    return std::nullopt;
  }
  return extent;
}

const SlotHeader* VaultReader::header(uint32_t index) const {
  const auto found = extent(index);
  return found ? reinterpret_cast<const SlotHeader*>(mapping_.data() + found->offset) : nullptr;
}

std::optional<SlotView> VaultReader::view(uint32_t index) const {
  const auto extent = this->extent(index);
  if (!extent) {
    return std::nullopt;
  }
  const auto* live = reinterpret_cast<const SlotHeader*>(mapping_.data() + extent->offset);
  if (live->state.load(std::memory_order_acquire) != static_cast<uint32_t>(SlotState::kSealed)) {
    return std::nullopt;
  }
  alignas(SlotHeader) char copy[sizeof(SlotHeader)];
  std::memcpy(copy, static_cast<const void*>(live), sizeof(copy));
  const auto& head = *reinterpret_cast<const SlotHeader*>(copy);
  const auto fits = [&](uint64_t offset, uint64_t bytes) {
    return bytes <= extent->bytes && offset <= extent->bytes - bytes;
  };
  if (head.magic != kSlotMagic || head.version != kVaultVersion || head.check != slotCheck(head) ||
      !fits(head.table_offset, head.table_bytes) ||
      !fits(head.objects_offset, head.objects_bytes) ||
      !fits(head.payload_offset, head.payload_bytes) ||
      head.chunk_count > extent->bytes / sizeof(uint64_t) ||
      !fits(head.chunk_hashes_offset, head.chunk_count * sizeof(uint64_t)) ||
      head.chunk_bytes == 0 ||
      head.payload_bytes / head.chunk_bytes + (head.payload_bytes % head.chunk_bytes != 0) !=
          head.chunk_count ||
      head.group_count > kMaxGroupDigests || head.chunk_hashes_offset % alignof(uint64_t) != 0) {
    return std::nullopt;
  }
  SlotView view;
  view.index = index;
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
  view.group_digests.assign(head.group_digests, head.group_digests + head.group_count);
  view.table_at = extent->offset + head.table_offset;
  view.objects_at = extent->offset + head.objects_offset;
  view.chunk_hashes_at = extent->offset + head.chunk_hashes_offset;
  view.payload_at = extent->offset + head.payload_offset;
  view.table_hash = head.table_hash;
  view.objects_hash = head.objects_hash;
  if (hashBytes(mapping_.data() + view.table_at, view.table_bytes) != view.table_hash ||
      hashBytes(mapping_.data() + view.objects_at, view.object_bytes) != view.objects_hash) {
    return std::nullopt;
  }
  return stillSealed(view) ? std::optional(std::move(view)) : std::nullopt;
}

std::vector<SlotView> VaultReader::slots() const {
  std::vector<SlotView> result;
  for (uint32_t i = 0; i < slots_; ++i) {
    if (auto found = view(i)) {
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
                        static_cast<uint8_t>(head->wish)});
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
  const auto* hashes = reinterpret_cast<const uint64_t*>(mapping_.data() + slot.chunk_hashes_at);
  const uint64_t last = (end - 1) / slot.chunk_bytes;
  for (uint64_t chunk = begin / slot.chunk_bytes; chunk <= last; ++chunk) {
    const uint64_t offset = chunk * slot.chunk_bytes;
    const uint64_t bytes = std::min(slot.chunk_bytes, slot.payload_bytes - offset);
    const uint64_t expected = hashes[chunk];
    const uint64_t found = hashBytes(payload(slot) + offset, bytes);
    if (found != expected) {
      faults.push_back({offset, expected, found});
    }
  }
  return faults;
}

bool VaultReader::stillSealed(const SlotView& slot) const {
  std::atomic_thread_fence(
      std::memory_order_acquire);  // what was read before was read before the loads below
  const SlotHeader* head = header(slot.index);
  return head != nullptr && head->generation.load(std::memory_order_acquire) == slot.generation &&
         head->state.load(std::memory_order_acquire) == static_cast<uint32_t>(SlotState::kSealed);
}

}  // namespace reft
