// Which snapshot the whole job has, and which slot may be overwritten: the two state machines of
// the commit exchange. Neither does I/O nor reads a clock; snapshot/commit/model/commit.pml is the
// same protocol for the model checker.
//
// The rule (one sentence): a slot may be overwritten only if it holds nothing, an aborted snapshot,
// or one older than the newest committed one. The outcome of (step, incarnation) is a function of
// the votes alone (committed = every rank sealed, aborted = some rank did not), so an agent that
// was killed and started again decides the same from repeated votes.
//
// Threads: one thread at a time (the engine's mutex, the agent's loop).
// Errors:  misuse throws InvalidArgument. Votes and outcomes that come late, twice or for unknown
// steps are harmless.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace reft {

// One attempt at a snapshot of the job. Ordered by step, then incarnation, for maps only: it does
// not say what is newer.
struct CommitKey {
  int64_t step = 0;
  uint64_t incarnation = 0;
  auto operator<=>(const CommitKey&) const = default;
};

// The rank's side: the slots of one vault, in one incarnation of the rank.
//
// Life of a slot: acquire → (sealed | dropped) → outcome. An outcome may arrive before sealed()
// (another rank dropped); the slot is then free as soon as it is sealed or dropped.
class SlotBook {
 public:
  static constexpr int64_t kNone = -1;

  explicit SlotBook(int slots);

  // The slot holds the snapshot that the job was restored from (or a sealed one that may still be
  // needed). It is kept until something newer of this incarnation is committed, whatever its step
  // number. Slots that are not adopted are free: what they hold is older than the restored step, or
  // belongs to a future that did not happen. Several slots may be adopted, but one must stay free:
  // throws InvalidArgument for the last one. Call before the first acquire().
  void adopt(int slot, int64_t step, uint64_t incarnation);

  // Claims a slot for writing (step, incarnation); nullopt: none may be overwritten before another
  // outcome arrives. Takes empty and aborted slots first, then the oldest. Steps must grow within
  // an incarnation, and only one slot may be in writing: throws InvalidArgument.
  std::optional<int> acquire(int64_t step, uint64_t incarnation);
  // Whether acquire() would find a slot.
  bool canAcquire() const;

  // The claimed slot was sealed in the vault (call after the release-store, before the vote).
  void sealed(int slot);
  // The claimed slot was given up; its contents are void.
  void dropped(int slot);

  // What the job decided. Ignored: repeated ones, and keys that no slot holds (so a wrong message
  // never frees the snapshot that is needed).
  void outcome(int64_t step, uint64_t incarnation, bool committed);

  // Newest committed step of this incarnation, else the newest adopted one, else kNone.
  int64_t newestCommitted() const;
  // Sealed snapshots whose outcome is not known yet.
  size_t undecided() const;
  // Slot that holds (step, incarnation) sealed and not aborted.
  std::optional<int> find(int64_t step, uint64_t incarnation) const;
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
  int64_t committed_ = kNone;  // of this incarnation
  int64_t last_acquired_ = kNone;
  std::optional<uint64_t> incarnation_;  // of the newest acquire()
};

// The agent's side: counts the votes of the node's ranks.
class CommitLedger {
 public:
  static constexpr size_t kRemembered = 64;  // keys, open and decided together, per incarnation
  static constexpr size_t kIncarnations = 4;

  struct Action {
    enum Kind : uint8_t {
      kBroadcast,  // tell every local rank the outcome (yes = committed)
      kAnswer,     // tell only `rank` the outcome: it voted again
      kNodeVote,   // tell local rank 0 how the node voted (yes = every local rank sealed)
    };
    Kind kind;
    CommitKey key;
    bool yes = false;
    int rank = -1;
    uint64_t cut = 0;  // kNodeVote: of the node's ranks together; outcomes: not 0 if the step was
                       // aborted for it
    uint8_t wish =
        0;  // kNodeVote: the greatest of the node's ranks; outcomes: the job's, of a committed step
  };

  // What a vault says of a key: that it is sealed there, and what the vote carried: its part of the
  // consistent-cut check, and its wish for the cadence (snapshot/cost/cadence.h; here it is a
  // number that one rank sets and all are told).
  struct Held {
    bool sealed = false;
    uint64_t cut = 0;
    uint8_t wish = 0;
  };
  // What the vault of `rank` says of `key` at this moment (nullopt: the vault is not known or not
  // readable); asked only for ranks whose vote is missing.
  using HoldsSealed = std::function<std::optional<Held>(int rank, const CommitKey& key)>;

  explicit CommitLedger(HoldsSealed holds_sealed = nullptr);

  // How many votes an incarnation needs. More than one node: the outcome comes from outside,
  // through jobOutcome(). Votes that came before are counted. Repeated calls replace. Throws
  // InvalidArgument if local_world < 1.
  std::vector<Action> expect(uint64_t incarnation, int local_world, bool multi_node);

  // A vote. The first vote of a rank for a key stays. A vote for a later step of the same
  // incarnation says that the rank has finished with all earlier ones: where its vote for those is
  // missing (this agent was started in between), the vault says how it voted: holds sealed →
  // sealed; else dropped. `cut`: the rank's part of the consistent-cut check
  // (intercept/record/cut.h). A step that every rank sealed at points of the program that do not
  // belong together is aborted.
  std::vector<Action> vote(int rank, const CommitKey& key, bool sealed, uint64_t cut,
                           uint8_t wish = 0);

  // Sealed slots found in a vault that was handed over: votes that an earlier agent may have
  // received.
  std::vector<Action> vaultHolds(int rank, const std::vector<std::pair<CommitKey, Held>>& sealed);

  // The job decided (more than one node); `cut` and `wish` as in Action.
  std::vector<Action> jobOutcome(const CommitKey& key, bool committed, uint64_t cut = 0,
                                 uint8_t wish = 0);

  struct Counters {
    uint64_t committed = 0, aborted = 0, repeated = 0, inferred = 0, inconsistent = 0;
  };
  const Counters& counters() const { return counters_; }
  // Newest committed key that this ledger decided or was told.
  std::optional<CommitKey> newestCommitted() const { return newest_committed_; }
  // Keys without an outcome, with the number of votes so far.
  std::vector<std::pair<CommitKey, size_t>> open() const;

 private:
  struct Ballots {
    std::map<int, Held> votes;  // by rank
    bool node_voted = false;
    std::optional<bool> outcome;
    uint8_t wish = 0;  // of the outcome
  };
  struct Incarnation {
    uint64_t id = 0;
    int local_world = 0;  // 0: not known yet
    bool multi_node = false;
    std::map<int64_t, Ballots> steps;
  };
  Incarnation& incarnation(uint64_t id);
  void record(Incarnation& inc, int rank, int64_t step, const Held& vote,
              std::vector<Action>& actions);
  void decide(Incarnation& inc, int64_t step, std::vector<Action>& actions);
  void settle(Incarnation& inc, int64_t step, Ballots& ballots, bool committed, uint64_t cut,
              uint8_t wish, std::vector<Action>& actions);

  HoldsSealed holds_sealed_;
  std::deque<Incarnation> incarnations_;  // newest last
  Counters counters_;
  std::optional<CommitKey> newest_committed_;
};

}  // namespace reft
