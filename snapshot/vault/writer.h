// A rank's vault, as the rank writes it: one memfd (or file) with counters, op log, span log and
// slots. reader.h is everybody else's view. Checksums of chunks are computed in copy.h.
//
// Threads: slot methods from one thread at a time per slot; stats() from any.
// Errors:  SystemError if memory or the file cannot be had, Unavailable on a file system that does
//          not write in place (place.h), InvalidArgument for misuse.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "intercept/base/unique_fd.h"
#include "snapshot/vault/identity.h"
#include "snapshot/vault/mapping.h"
#include "snapshot/vault/rank_stats.h"
#include "snapshot/vault/span_log.h"
#include "snapshot/vault/vault_format.h"

namespace reft {

class Vault {
 public:
  // With an empty `path`, a memfd sealed against shrinking. Otherwise a file of mode 0600, which
  // replaces an earlier one when it is complete.
  static std::unique_ptr<Vault> create(const VaultIdentity& identity, uint32_t slots,
                                       uint32_t op_log_records, const std::string& path = "");
  // Takes over the vault that an earlier incarnation of this rank left; its slots stay as they are.
  // Throws Corruption if it belongs to another rank, job or world size.
  static std::unique_ptr<Vault> adopt(UniqueFd fd, const VaultIdentity& identity);

  int fd() const { return fd_.get(); }
  uint32_t slots() const { return slots_; }
  RankStats& stats() const;
  void* opLogArea() const;
  uint64_t opLogBytes() const;
  SpanLog& spans() { return *span_log_; }  // empty at first, also after adopt()
  uint64_t bytes() const;                  // length of the file, now
  bool lostPages() const;  // the disk under it has failed: what is sealed may not be in the file

  // Makes slot `index` large enough; a slot that has to move loses its contents. Touches new memory
  // before it returns, because the first write to a fresh page costs three times a copy.
  void reserveSlot(uint32_t index, uint64_t table_bytes, uint64_t object_bytes,
                   uint64_t chunk_count, uint64_t payload_bytes);
  // reserveSlot calls `room` with the bytes of each part before it touches that; false: the slot
  // gets none, as if memory had run out.
  void askRoom(Room room) { room_ = std::move(room); }
  // reserveSlot calls `moving` with the payload of a slot that is about to move, while it is
  // mapped.
  void beforeMove(std::function<void(std::byte* payload)> moving) {
    before_move_ = std::move(moving);
  }

  // Life of a slot: beginSlot → the caller fills payload() and chunkHashes() → sealSlot. Readers
  // ignore the slot until it is sealed.
  void beginSlot(uint32_t index, int64_t step, uint64_t incarnation, std::string_view table,
                 uint64_t table_hash, uint64_t chunk_bytes, uint64_t payload_bytes,
                 uint64_t chunk_count);
  // Returns false if `objects` do not fit: skip the snapshot and reserve more for the next.
  bool putObjects(uint32_t index, std::string_view objects);
  // A part of the objects that comes later; call hashObjects() after the last.
  void putObjectPart(uint32_t index, uint64_t offset, std::span<const std::byte> bytes);
  void hashObjects(uint32_t index, uint64_t bytes);
  std::byte* payload(uint32_t index) const;
  uint64_t* chunkHashes(uint32_t index) const;
  // What the slot's vote will carry beside yes or no; 0 after beginSlot.
  void setBallot(uint32_t index, uint64_t cut, uint64_t replicas, uint8_t proposal, bool plan_anew);
  void sealSlot(uint32_t index, std::span<const uint64_t> group_digests, int64_t now_ns);
  void clearSlot(uint32_t index);
  // Gives the memory of a slot back; reserveSlot can take some again. Returns the bytes.
  uint64_t releaseSlot(uint32_t index);
  uint64_t objectCapacity(uint32_t index) const;
  uint64_t payloadCapacity(uint32_t index) const;

 private:
  Vault() = default;
  struct Slot {
    Mapping mapping;
    uint64_t table_capacity = 0, object_capacity = 0, chunk_capacity = 0, payload_capacity = 0;
    uint64_t table_hash = 0;  // hash of the table in the slot
    // Offsets come from here and never from the header, where others may have written: a foreign
    // value must not aim the writer.
    uint64_t objectsAt() const { return kPage + table_capacity; }
    uint64_t chunkHashesAt() const { return objectsAt() + object_capacity; }
    uint64_t payloadAt() const { return chunkHashesAt() + chunk_capacity * sizeof(uint64_t); }
  };
  void freeGaps(uint64_t length);
  Superblock* superblock() const;
  SlotHeader* header(uint32_t index) const;

  UniqueFd fd_;
  uint32_t slots_ = 0;
  uint64_t unused_from_ = 0;  // start of the space that a failed growth left at the end; 0: none
  Mapping fixed_;             // superblock, counters, op log, span log
  std::unique_ptr<SpanLog> span_log_;
  std::vector<Slot> slot_;
  std::function<void(std::byte*)> before_move_;
  Room room_;
};

}  // namespace reft
