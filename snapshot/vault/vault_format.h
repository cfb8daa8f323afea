// The bytes of a vault, as structs. FORMAT.md describes the same in words; where they differ, one
// of them is a bug.
//
// Everything is little endian and naturally aligned. A reader trusts nothing that it has not
// checked: the writer may have been killed at any instruction, or be hostile.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "snapshot/vault/rank_stats.h"

namespace reft {

constexpr uint64_t kVaultMagic = 0x31544C5654464552;  // "REFTVLT1"
constexpr uint64_t kSlotMagic = 0x31544C5354464552;   // "REFTSLT1"
constexpr uint32_t kVaultVersion = 15;
constexpr uint32_t kMaxSlots = 3;
constexpr uint64_t kPage = 4096;
constexpr uint32_t kMaxGroupDigests = 64;
constexpr uint32_t kSpanRecords = 4096;

// Where a slot lies in the vault. `check` covers the two others, so a torn update is an absent
// slot.
struct SlotExtent {
  uint64_t offset;  // multiple of kPage; 0 = no slot yet
  uint64_t bytes;
  uint64_t check;
};

// Page 0. Written once, before other processes see the vault; only `extents` changes later.
struct Superblock {
  uint64_t magic;
  uint32_t version;
  uint32_t slots;
  int32_t rank;
  int32_t world;
  uint64_t stats_offset;
  uint64_t op_log_offset;
  uint64_t op_log_bytes;
  uint64_t span_log_offset;
  uint64_t span_log_bytes;
  char job[128];   // NUL-terminated
  uint64_t check;  // XXH3-64 of the bytes before
  SlotExtent extents[kMaxSlots];
};
static_assert(sizeof(Superblock) <= kPage);

// Page 1.
static_assert(sizeof(RankStats) <= kPage);

// Values are in the file: do not change.
enum class SlotState : uint32_t { kEmpty = 0, kWriting = 1, kSealed = 2 };

// First page of a slot. Offsets count from the start of the slot. `check` = XXH3-64 of this struct
// with state and check 0.
struct SlotHeader {
  uint64_t magic;
  uint32_t version;
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> generation;  // +1 before each overwrite; a reader that sees it move retries
  uint64_t check;
  int64_t step;
  uint64_t incarnation;
  uint64_t table_offset, table_bytes, table_hash;
  uint64_t objects_offset, objects_bytes, objects_hash;
  uint64_t chunk_hashes_offset, chunk_count, chunk_bytes;
  uint64_t payload_offset, payload_bytes;
  int64_t sealed_ns;
  uint64_t cut;  // this rank's part of the consistent-cut check (intercept/record/cut.h)
  uint32_t group_count;
  uint8_t proposal;   // proposed cadence in this rank's vote (snapshot/cost/cadence.h)
  uint8_t plan_anew;  // whether its vote asks all ranks to plan (snapshot/commit/plan_rounds.h)
  uint8_t reserved[2];
  // Content hash of each sharding group, of samples and of a part, in table order.
  uint64_t group_digests[kMaxGroupDigests];
  uint64_t
      replicas;  // this rank's part of the check that replicas agree (snapshot/state/agreement.h)
};
static_assert(sizeof(SlotHeader) <= kPage);

// The `check` that each struct must carry.
uint64_t checkOf(const Superblock& block);
uint64_t checkOf(const SlotExtent& extent, uint32_t index);
uint64_t checkOf(const SlotHeader& header);

// Whether the extent is whole and lies between the fixed part (of `fixed_bytes`) and the end of the
// file.
bool isValid(const SlotExtent& extent, uint32_t index, uint64_t fixed_bytes, uint64_t file_bytes);

}  // namespace reft
