// A rank's vault: one memfd (or file) with counters, op log and slots. Vault is the rank's side (it
// writes), VaultReader everybody else's.
//
// Threads: Vault's slot methods from one thread at a time per slot; stats() from any. A VaultReader
// may be used while
//          the writer runs: what it returns was sealed when it looked, and verify()/stillSealed()
//          tell whether it still is.
// Errors:  SystemError when memory or the file cannot be had; VaultReader throws Corruption for
// anything that is not a
//          valid vault, and reports a bad slot as absent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "intercept/base/unique_fd.h"
#include "snapshot/state/table.h"
#include "snapshot/vault/span_log.h"
#include "snapshot/vault/vault_format.h"

namespace reft {

struct VaultIdentity {
  std::string job;
  int rank = 0;
  int world = 1;
};

// XXH3-64.
uint64_t hashBytes(const void* data, size_t bytes, uint64_t seed = 0);

// An mmap with one owner.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t offset, uint64_t bytes, bool writable);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

class Vault {
 public:
  // `path` empty: a memfd sealed against shrinking. Otherwise a file (mode 0600), replaced if it
  // exists and `fresh`.
  static std::unique_ptr<Vault> create(const VaultIdentity& identity, uint32_t slots,
                                       uint32_t op_log_records, const std::string& path = "");
  // Takes over the vault that an earlier incarnation of this rank left. Slots stay as they are.
  // Throws Corruption if it belongs to another rank, job or world size.
  static std::unique_ptr<Vault> adopt(UniqueFd fd, const VaultIdentity& identity);

  int fd() const { return fd_.get(); }
  uint32_t slots() const { return slots_; }
  RankStats& stats() const;
  void* opLogArea() const;
  uint64_t opLogBytes() const;
  SpanLog& spans() { return *span_log_; }  // empty at first, also after adopt()
  uint64_t bytes() const;                  // length of the file

  // Makes slot `index` large enough; contents are lost if it has to move. New memory is touched
  // before this returns, because the first write to a fresh page costs three times a copy.
  void reserveSlot(uint32_t index, uint64_t table_bytes, uint64_t object_bytes,
                   uint64_t chunk_count, uint64_t payload_bytes);
  // Called by reserveSlot with the payload of a slot that is about to move, while it is still
  // mapped.
  void beforeMove(std::function<void(std::byte* payload)> tell) { before_move_ = std::move(tell); }

  // Slot life: begin → payload() and hashes are filled by the caller → seal. Until seal the slot is
  // ignored by readers.
  void beginSlot(uint32_t index, int64_t step, uint64_t incarnation, std::string_view table,
                 uint64_t table_hash, uint64_t chunk_bytes, uint64_t payload_bytes,
                 uint64_t chunk_count);
  // False if `objects` do not fit: the snapshot has to be skipped, reserveSlot with more, later.
  bool putObjects(uint32_t index, std::string_view objects);
  // Bytes of objects that came later; hashObjects() when all have.
  void putObjectPart(uint32_t index, uint64_t offset, std::span<const std::byte> bytes);
  void hashObjects(uint32_t index, uint64_t bytes);
  std::byte* payload(uint32_t index) const;
  uint64_t* chunkHashes(uint32_t index) const;
  // What the vote for it will carry beside the outcome; 0 after beginSlot.
  void setBallot(uint32_t index, uint64_t cut, uint8_t wish);
  void sealSlot(uint32_t index, std::span<const uint64_t> group_digests, int64_t now_ns);
  void clearSlot(uint32_t index);
  uint64_t objectCapacity(uint32_t index) const;
  uint64_t payloadCapacity(uint32_t index) const;

 private:
  Vault() = default;
  struct Slot {
    Mapping mapping;
    uint64_t table_capacity = 0, object_capacity = 0, chunk_capacity = 0, payload_capacity = 0;
    uint64_t table_hash = 0;  // of the table that lies in the slot
    // Never taken from the header again: what others may have written there must not aim the
    // writer.
    uint64_t objectsAt() const { return kPage + table_capacity; }
    uint64_t chunkHashesAt() const { return objectsAt() + object_capacity; }
    uint64_t payloadAt() const { return chunkHashesAt() + chunk_capacity * sizeof(uint64_t); }
  };
  Superblock* superblock() const;
  SlotHeader* header(uint32_t index) const;

  UniqueFd fd_;
  uint32_t slots_ = 0;
  uint64_t unused_from_ =
      0;           // start of what a growth that failed left at the end of the file; 0: nothing
  Mapping fixed_;  // superblock, stats, op log, span log
  std::unique_ptr<SpanLog> span_log_;
  std::vector<Slot> slot_;
  std::function<void(std::byte*)> before_move_;
};

// One sealed slot, as found.
struct SlotView {
  uint32_t index = 0;
  int64_t step = -1;
  uint64_t incarnation = 0;
  uint64_t generation = 0;
  int64_t sealed_ns = 0;
  uint64_t cut = 0;
  uint64_t payload_bytes = 0, chunk_bytes = 0, chunk_count = 0, object_bytes = 0, table_bytes = 0;
  std::vector<uint64_t> group_digests;
  // Where its parts lie in the vault, checked once: what the writer changes later never moves a
  // read out of bounds.
  uint64_t table_at = 0, objects_at = 0, chunk_hashes_at = 0, payload_at = 0;
  uint64_t table_hash = 0, objects_hash = 0;
};

// A slot's header as written, verified by nothing.
struct RawSlot {
  SlotState state = SlotState::kEmpty;
  int64_t step = -1;
  uint64_t incarnation = 0;
  uint64_t cut = 0;
  uint8_t wish = 0;
};

struct ChunkFault {
  uint64_t payload_offset;
  uint64_t expected, found;
};

class VaultReader {
 public:
  // Maps `fd` read-only (keeps a duplicate). A memfd must be sealed against shrinking.
  explicit VaultReader(int fd);

  const VaultIdentity& identity() const { return identity_; }
  uint64_t bytes() const { return mapping_.bytes(); }
  const RankStats& stats() const;
  const void* opLogArea() const;
  uint64_t opLogBytes() const;
  const void* spanLogArea() const;
  uint64_t spanLogBytes() const;

  // Maps what the writer has added since. Call before slots() on a live vault.
  void refresh();
  // Slots that are sealed and whose header, table and objects check out.
  std::vector<SlotView> slots() const;
  std::vector<RawSlot> rawSlots() const;
  SnapshotTable table(const SlotView& slot) const;  // throws Corruption
  std::string objects(const SlotView& slot) const;  // throws Corruption (hash)
  const std::byte* payload(const SlotView& slot) const;
  // Hashes the chunks that [begin, end) of the payload touches; empty = intact.
  std::vector<ChunkFault> verify(const SlotView& slot, uint64_t begin = 0,
                                 uint64_t end = UINT64_MAX) const;
  // False if the writer has begun to overwrite the slot since `slot` was read.
  bool stillSealed(const SlotView& slot) const;

 private:
  friend class Vault;
  uint64_t fixedBytes() const { return span_log_offset_ + span_log_bytes_; }
  std::optional<SlotExtent> extent(uint32_t index) const;  // nullopt if it is not valid
  const SlotHeader* header(uint32_t index) const;          // nullptr if the extent is not valid
  std::optional<SlotView> view(uint32_t index) const;

  UniqueFd fd_;
  Mapping mapping_;
  VaultIdentity identity_;
  uint32_t slots_ = 0;
  uint64_t stats_offset_ = 0, op_log_offset_ = 0, op_log_bytes_ = 0, span_log_offset_ = 0,
           span_log_bytes_ = 0;
};

}  // namespace reft
