// Copies of the newest slots of ranks of another node, each in a vault of its own as that rank
// would have written it: who finds one restores from it as from any other.
//
// A slot counts only when each of its parts and chunks matched the owner's hash of it here. A copy
// holds two steps, as the rank itself does; a third one where the rank has two that are both needed
// still, or while its attempt has not committed anything: until then each step of the attempt
// before may be the one that the next restart resumes.
//
// Threads: one at a time; what copies() gives may be read elsewhere while the store writes, as any
// vault.
// Errors:  begin() throws Unavailable if there is no memory for the slot, SystemError for a vault;
// Incoming::took() throws Corruption for bytes that do not match.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "agent/mesh/frames.h"
#include "intercept/base/unique_fd.h"
#include "snapshot/vault/mapping.h"
#include "snapshot/vault/writer.h"

namespace reft::agent {

class CopyStore {
 public:
  // Whose copy it is: a rank of a job of so many ranks.
  struct Owner {
    int rank = 0;
    int world = 0;
    auto operator<=>(const Owner&) const = default;
  };

  // A slot under way. It goes no further once took() has thrown.
  class Incoming {
   public:
    // Where the bytes that come next go; empty: all are there.
    std::span<std::byte> next();
    // So many of them are there.
    void took(size_t bytes);

   private:
    friend class CopyStore;
    enum class Part : uint8_t { kTable, kObjects, kHashes, kPayload, kDone };
    Incoming(Vault& vault, uint32_t slot, const SlotHead& head)
        : vault_(vault), slot_(slot), head_(head) {
      skipEmpty();
    }
    uint64_t bytesOfPart() const;
    std::byte* bufferOfPart();
    void endPart();
    void skipEmpty();
    void beginSlot();
    void hashChunks();

    Vault& vault_;
    const uint32_t slot_;
    const SlotHead head_;
    Part part_ = Part::kTable;
    uint64_t at_ = 0;                         // in the part
    uint64_t hashed_ = 0;                     // chunks
    std::vector<std::byte> table_, objects_;  // until the slot is there
    std::vector<uint64_t> hashes_;
  };

  explicit CopyStore(std::string job) : job_(std::move(job)) {}

  // Whether so many bytes more may be taken.
  void limit(Room room) { room_ = std::move(room); }

  // Makes room for a slot, which may take seconds; one per owner is under way at a time. Nothing if
  // it is there (`answer`: kYes), or all room holds steps that may still be needed (kLater).
  std::unique_ptr<Incoming> begin(const SlotHead& head, Kept& answer);
  // All bytes are there: it counts from now on.
  void seal(Incoming& incoming, int64_t now_ns);

  struct Copy {
    Owner owner;
    std::shared_ptr<const UniqueFd> vault;  // to read
  };
  std::vector<Copy> copies() const;
  // The copy is whole: nothing writes to the vault any more. The attempt that had it last, and the
  // step from which that went on (-1: none).
  void complete(const Owner& owner, uint64_t writer, int64_t resumed);
  // Gives up copies that hold no step.
  void dropEmpty();
  // Gives up all copies but these.
  void keepOnly(const std::set<Owner>& owners);
  uint64_t bytes() const;

 private:
  struct Slot {
    std::optional<CommitKey> key;  // sealed
    bool used = false;             // has memory
  };
  struct Vaulted {
    std::unique_ptr<Vault> vault;
    std::shared_ptr<const UniqueFd> shared;  // of the vault
    std::vector<Slot> slots;
  };
  // The slot to write to; nothing if there is none.
  std::optional<uint32_t> choose(const Vaulted& kept, const SlotHead& head) const;

  std::string job_;
  Room room_;
  std::map<Owner, Vaulted> kept_;
};

}  // namespace reft::agent
