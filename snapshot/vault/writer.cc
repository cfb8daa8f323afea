#include "snapshot/vault/writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/record/op_log.h"
#include "snapshot/state/align.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/place.h"
#include "snapshot/vault/reader.h"

namespace reft {

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
    if (const std::string problem = vaultPlaceProblem(vault->fd_.get()); !problem.empty()) {
      ::unlink(temporary.c_str());
      throw Unavailable("the vault " + path + " " + problem +
                        "; set REFT_VAULT_DIR to a directory on tmpfs, ext4 or xfs, or unset it");
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
  block.check = checkOf(block);
  const uint64_t bytes = block.span_log_offset + block.span_log_bytes;
  if (::ftruncate(vault->fd_.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError("sizing the vault to " + std::to_string(bytes) + " bytes");
  }
  // F_SEAL_SEAL: no process can forbid this rank to write or to grow its vault.
  if (path.empty() && ::fcntl(vault->fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    throw SystemError("sealing the vault");
  }
  vault->fixed_ = Mapping(vault->fd_.get(), 0, bytes, true);
  vault->fixed_.populate(vault->fd_.get(), 0);
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
  vault->slots_ = reader.slotCount();
  vault->fixed_ = Mapping(vault->fd_.get(), 0, reader.fixedBytes(), true);
  vault->span_log_ = std::make_unique<SpanLog>(
      vault->fixed_.data() + reader.fixedBytes() - reader.spanLogBytes(), kSpanRecords);
  vault->slot_.resize(vault->slots_);
  const uint64_t length = fileBytes(vault->fd_.get());
  for (uint32_t i = 0; i < vault->slots_; ++i) {
    const SlotExtent extent = vault->superblock()->extents[i];
    if (!isValid(extent, i, vault->fixed_.bytes(), length)) {
      continue;
    }
    Slot& slot = vault->slot_[i];
    slot.mapping = Mapping(vault->fd_.get(), extent.offset, extent.bytes, true);
    const SlotHeader* header = vault->header(i);
    // Offsets mean something only if the header is whole; otherwise reserveSlot lays the slot out.
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
  vault->freeGaps(length);
  return vault;
}

// A process that ended while it took memory for a slot has left some that no slot has.
void Vault::freeGaps(uint64_t length) {
  std::vector<std::pair<uint64_t, uint64_t>> used{{0, fixed_.bytes()}};
  for (uint32_t i = 0; i < slots_; ++i) {
    const SlotExtent extent = superblock()->extents[i];
    if (slot_[i].mapping.data() != nullptr) {
      used.emplace_back(extent.offset, extent.offset + extent.bytes);
    }
  }
  used.emplace_back(length, length);
  std::sort(used.begin(), used.end());
  uint64_t at = 0;
  for (const auto& [begin, end] : used) {
    if (begin > at) {
      ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                  static_cast<off_t>(begin - at));
    }
    at = std::max(at, end);
  }
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
bool Vault::lostPages() const {
  return fixed_.lostPages() || std::any_of(slot_.begin(), slot_.end(), [](const Slot& slot) {
           return slot.mapping.lostPages();
         });
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
  if (room_ && !room_(extent.bytes)) {
    // A slot that grows needs no more than the difference, if its old place goes first. Nothing
    // needs what it holds.
    if (releaseSlot(index) == 0 || !room_(extent.bytes)) {
      throw SystemError("taking " + std::to_string(extent.bytes) +
                            " bytes for the vault: this node has not enough left",
                        ENOMEM);
    }
    return reserveSlot(index, table_bytes, object_bytes, chunk_count, payload_bytes);
  }
  // Address space first, length second: a length that cannot be mapped would lock every reader out.
  Mapping mapping(fd_.get(), extent.offset, extent.bytes, true);
  if (extent.offset + extent.bytes > length &&
      ::ftruncate(fd_.get(), static_cast<off_t>(extent.offset + extent.bytes)) != 0) {
    throw SystemError("growing the vault by " + std::to_string(extent.bytes) + " bytes");
  }
  try {
    mapping.populate(fd_.get(), extent.offset, room_);
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
  logDebug("snapshot", "slot ", index, " gets ", extent.bytes, " bytes at ", extent.offset,
           " of the vault, had ", old.bytes);
  extent.check = checkOf(extent, index);
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
  // Until everything else is set, so that nothing of the older snapshot is taken for this one.
  header->step = -1;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memset(chunkHashes(index), 0, chunk_count * sizeof(uint64_t));
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
  std::atomic_thread_fence(std::memory_order_release);
  header->step = step;
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

void Vault::setBallot(uint32_t index, uint64_t cut, uint64_t replicas, uint8_t proposal,
                      bool plan_anew) {
  header(index)->cut = cut;
  header(index)->replicas = replicas;
  header(index)->proposal = proposal;
  header(index)->plan_anew = plan_anew ? 1 : 0;
}

void Vault::sealSlot(uint32_t index, std::span<const uint64_t> group_digests, int64_t now_ns) {
  SlotHeader* header = this->header(index);
  header->group_count =
      static_cast<uint32_t>(std::min<size_t>(group_digests.size(), kMaxGroupDigests));
  std::memset(header->group_digests, 0, sizeof(header->group_digests));
  std::copy_n(group_digests.begin(), header->group_count, header->group_digests);
  header->sealed_ns = now_ns;
  header->check = checkOf(*header);
  header->state.store(static_cast<uint32_t>(SlotState::kSealed), std::memory_order_release);
}

void Vault::clearSlot(uint32_t index) {
  if (slot_[index].mapping.data() != nullptr) {
    header(index)->state.store(static_cast<uint32_t>(SlotState::kEmpty), std::memory_order_seq_cst);
  }
}

uint64_t Vault::releaseSlot(uint32_t index) {
  Slot& slot = slot_[index];
  const SlotExtent old = superblock()->extents[index];
  if (old.offset == 0 || slot.mapping.data() == nullptr) {
    return 0;
  }
  clearSlot(index);
  if (before_move_) {
    before_move_(payload(index));
  }
  superblock()->extents[index] = SlotExtent{};
  slot = Slot{};
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(old.offset),
              static_cast<off_t>(old.bytes));
  return old.bytes;
}

}  // namespace reft
