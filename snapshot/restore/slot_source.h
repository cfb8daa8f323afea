// Reads one slot of a vault, checked: a sealed one into live memory, or one that its writer did not
// finish, to compare with it.
//
// copy() hashes every chunk that it takes a byte of, in the same pass over the memory, and
// afterwards checks that the writer has not begun to overwrite the slot.
//
// Threads: one at a time. Errors: Corruption when the slot holds another step, a checksum does not
// match, or the slot is overwritten meanwhile; destinations are then partly written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "snapshot/state/table.h"
#include "snapshot/vault/reader.h"

namespace reft {

class SlotSource {
 public:
  // Bytes of the payload and where they go.
  struct Copy {
    uint64_t from = 0, bytes = 0;
    std::byte* to = nullptr;
    uint64_t at = 0;  // partOf(): in the bytes of the part
  };
  static uint64_t bytesOf(const std::vector<Copy>& copies);

  // Keeps a duplicate of `fd`.
  SlotSource(int fd, uint32_t slot, int64_t step, uint64_t incarnation);

  // The first step after `step` that the same incarnation has left in a vault, sealed or not;
  // nullptr if there is none that can be read.
  static std::unique_ptr<SlotSource> after(int fd, int64_t step, uint64_t incarnation);

  int64_t step() const { return view_.step; }
  // Its writer has looked for late writes, and found none.
  bool isSealed() const { return view_.state == SlotState::kSealed; }
  const SnapshotTable& table() const { return table_; }
  std::string objects() const { return reader_.objects(view_); }
  // Payload offset of bytes [begin, end) of a region, which this slot stores as part of `shard`.
  uint64_t offsetOf(const std::string& region, uint32_t shard, uint64_t begin, uint64_t end) const;
  // That of bytes [begin, end) of a private region.
  uint64_t offsetWithin(const std::string& region, uint64_t begin, uint64_t end) const;
  void copy(std::vector<Copy> copies) const;
  // Into `to`, each where it lies in the part.
  void copyInto(std::vector<Copy> copies, std::span<std::byte> to) const;
  // A part of a group, which is a shard or the rank's parity, or a part of the private regions
  // (group ""): its bytes, one behind the other. copyPart() throws Corruption if `to` has another
  // length.
  const std::vector<Copy>& partOf(const std::string& group, uint32_t part) const;
  uint64_t bytesOf(const std::string& group, uint32_t part) const;
  void copyPart(const std::string& group, uint32_t part, std::span<std::byte> to) const;
  // Calls fn(where the bytes lie in the part, the bytes) for all of a part that has `bytes`, chunk
  // by chunk, each after it was hashed, while it is in the cache. Errors as those of copyPart().
  void visitPart(
      const std::string& group, uint32_t part, uint64_t bytes,
      const std::function<void(uint64_t at, std::span<const std::byte> bytes)>& fn) const;
  // Whether the vault is a file on a file system that is not in memory.
  bool isOnStorage() const { return on_storage_; }
  // False once the rank writes to the slot.
  bool isUnchanged() const { return reader_.isUnchanged(view_); }
  // The chunks that do not match their checksums, or were not copied, in the order of the payload.
  std::vector<ChunkFault> faults() const { return reader_.verify(view_); }
  const std::byte* bytesAt(uint64_t payload_offset) const {
    return reader_.payload(view_) + payload_offset;
  }

 private:
  SlotSource(int fd, SlotView view);
  void findOffsets();
  std::vector<Copy> findPart(const std::string& group, uint32_t part) const;
  void checkLength(const std::string& group, uint32_t part, uint64_t bytes) const;
  std::string where() const;  // for messages: "rank N step S: "
  [[noreturn]] void throwDamaged(uint64_t chunk) const;
  void checkUnchanged() const;
  using Place = std::tuple<std::string, uint32_t, uint64_t, uint64_t>;

  VaultReader reader_;
  bool on_storage_;
  SlotView view_;
  SnapshotTable table_;
  std::map<Place, uint64_t> offsets_;
  mutable std::map<std::pair<std::string, uint32_t>, std::vector<Copy>> parts_;  // as asked for
};

}  // namespace reft
