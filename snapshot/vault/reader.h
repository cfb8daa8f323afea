// A vault, as everybody but its rank sees it: the agent, the tools, a restarted rank.
//
// Threads: one reader may be used while the writer runs: what it returns was sealed when it looked,
//          and verify() and isUnchanged() tell whether it still is.
// Errors:  Corruption for what is not a valid vault; a bad slot is absent from slots().
// SystemError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "intercept/base/unique_fd.h"
#include "snapshot/state/table.h"
#include "snapshot/vault/identity.h"
#include "snapshot/vault/mapping.h"
#include "snapshot/vault/rank_stats.h"
#include "snapshot/vault/vault_format.h"

namespace reft {

// One sealed or unfinished slot, as the reader found it.
struct SlotView {
  uint32_t index = 0;
  SlotState state = SlotState::kSealed;
  int64_t step = -1;
  uint64_t incarnation = 0;
  uint64_t generation = 0;
  int64_t sealed_ns = 0;
  uint64_t cut = 0;
  uint64_t payload_bytes = 0, chunk_bytes = 0, chunk_count = 0, object_bytes = 0, table_bytes = 0;
  std::vector<uint64_t> group_digests;
  // Offsets in the vault, checked once: no later change by the writer moves a read out of bounds.
  uint64_t table_at = 0, objects_at = 0, chunk_hashes_at = 0, payload_at = 0;
  uint64_t table_hash = 0, objects_hash = 0;
};

// A slot's header as written, not verified.
struct RawSlot {
  SlotState state = SlotState::kEmpty;
  int64_t step = -1;
  uint64_t incarnation = 0;
  uint64_t cut = 0;
  uint64_t replicas = 0;
  uint8_t proposal = 0;
  bool plan_anew = false;
};

struct ChunkFault {
  uint64_t payload_offset;
  uint64_t expected, found;
};

class VaultReader {
 public:
  // Maps `fd` read-only and keeps a duplicate. A memfd must be sealed against shrinking.
  explicit VaultReader(int fd);

  // As the constructor, without a map: whose vault `fd` is.
  static VaultIdentity identityOf(int fd);

  const VaultIdentity& identity() const { return identity_; }
  uint32_t slotCount() const { return slots_; }
  // Bytes before the first slot: superblock, counters, op log and, at their end, the span log.
  uint64_t fixedBytes() const { return span_log_offset_ + span_log_bytes_; }
  uint64_t bytes() const { return mapping_.bytes(); }
  const RankStats& stats() const;
  const void* opLogArea() const;
  uint64_t opLogBytes() const;
  const void* spanLogArea() const;
  uint64_t spanLogBytes() const;

  // Maps what the writer has added since. Call it before slots() on a live vault.
  void refresh();
  // The sealed slots whose header, table and objects match their checksums.
  std::vector<SlotView> slots() const;
  // The slots whose writer has not sealed them, with a table that matches its checksum. The hash of
  // a chunk that has not been copied is 0, so verify() tells which have. Small state that is not
  // complete counts as none.
  std::vector<SlotView> unfinishedSlots() const;
  std::vector<RawSlot> rawSlots() const;
  SnapshotTable table(const SlotView& slot) const;  // throws Corruption
  std::string objects(const SlotView& slot) const;  // throws Corruption
  const std::byte* payload(const SlotView& slot) const;
  // Hashes the chunks that [begin, end) of the payload touches. Returns nothing if they are intact.
  std::vector<ChunkFault> verify(const SlotView& slot, uint64_t begin = 0,
                                 uint64_t end = UINT64_MAX) const;
  // What the writer recorded of a chunk below slot.chunk_count; 0: it has not been copied.
  uint64_t hashOf(const SlotView& slot, uint64_t chunk) const;
  // Returns false if the writer has sealed or begun to overwrite the slot since `slot` was read.
  bool isUnchanged(const SlotView& slot) const;

 private:
  std::optional<SlotExtent> extent(uint32_t index) const;  // nullopt if it is not valid
  const SlotHeader* header(uint32_t index) const;          // nullptr if the extent is not valid
  std::vector<SlotView> views(SlotState state) const;
  std::optional<SlotView> view(uint32_t index, SlotState state) const;

  UniqueFd fd_;
  Mapping mapping_;
  VaultIdentity identity_;
  uint32_t slots_ = 0;
  uint64_t stats_offset_ = 0, op_log_offset_ = 0, op_log_bytes_ = 0, span_log_offset_ = 0,
           span_log_bytes_ = 0;
};

}  // namespace reft
