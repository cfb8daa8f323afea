// Which slot of a vault the rank may overwrite: the rank's half of the commit exchange. The agent's
// half is commit_ledger.h; snapshot/commit/model/commit.pml is the same protocol for the model
// checker.
//
// The rule: a slot may be overwritten only if it is empty, or holds an aborted snapshot, or holds
// one older than the newest committed one. No I/O, no clock.
//
// Threads: one at a time (the engine's mutex).
// Errors:  misuse throws InvalidArgument. Outcomes that are late, repeated or for unknown steps
// have
//          no effect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "snapshot/commit/commit_key.h"

namespace reft {

// The slots of one vault, in one incarnation of the rank.
//
// Life of a slot: acquire → (sealed | dropped) → outcome. An outcome may arrive before sealed(),
// because another rank dropped; the slot is then free as soon as it is sealed or dropped.
class SlotBook {
 public:
  static constexpr int64_t kNone = -1;

  explicit SlotBook(int slots);

  // The slot holds the snapshot that the job was restored from, or a sealed one that may still be
  // needed. The book keeps it until a newer snapshot of this incarnation is committed, whatever its
  // step number. Slots that are not adopted are free: their contents are older than the restored
  // step, or belong to a future that did not happen. Several slots may be adopted, but one must
  // stay free: throws InvalidArgument for the last one. Call before the first acquire().
  void adopt(int slot, int64_t step, uint64_t incarnation);

  // Claims a slot for writing (step, incarnation). Returns nullopt if no slot may be overwritten
  // before another outcome arrives. Takes empty and aborted slots first, then the oldest. Steps
  // must grow within an incarnation, and one slot may be in writing at a time: throws
  // InvalidArgument.
  std::optional<int> acquire(int64_t step, uint64_t incarnation);
  // Whether acquire() would find a slot.
  bool canAcquire() const;

  // The claimed slot was sealed in the vault. Call after the release-store, before the vote.
  void sealed(int slot);
  // The claimed slot was given up; its contents are void.
  void dropped(int slot);

  // The job's decision. Ignores repeated outcomes and keys that no slot holds, so that a wrong
  // message never frees the snapshot that is needed.
  void outcome(int64_t step, uint64_t incarnation, bool committed);

  // Newest committed step of this incarnation, else the newest adopted one, else kNone.
  int64_t newestCommitted() const;
  // Number of sealed snapshots without an outcome.
  size_t undecided() const;
  // Slot that holds (step, incarnation) sealed and not aborted.
  std::optional<int> find(int64_t step, uint64_t incarnation) const;
  // Whether the slot holds a sealed snapshot that is not aborted.
  bool holds(int slot) const;
  // Whether nothing in the slot is needed any more.
  bool isFree(int slot) const { return reusable(slots_[static_cast<size_t>(slot)]); }
  int slots() const { return static_cast<int>(slots_.size()); }

 private:
  enum class State : uint8_t { kEmpty, kWriting, kSealed, kAborted };
  struct Slot {
    State state = State::kEmpty;
    bool adopted = false;        // from an earlier incarnation: older than everything of this one
    bool aborted_early = false;  // outcome aborted while in writing
    CommitKey key;
  };
  bool reusable(const Slot& slot) const;
  Slot& writing(int slot);

  std::vector<Slot> slots_;
  int64_t committed_ = kNone;  // newest committed step of this incarnation
  int64_t last_acquired_ = kNone;
  std::optional<uint64_t> incarnation_;  // incarnation of the newest acquire()
};

}  // namespace reft
