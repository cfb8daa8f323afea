// Which snapshot the whole job has: the agent's half of the commit exchange, which counts the votes
// of the node's ranks. The rank's half is slot_book.h; snapshot/commit/model/commit.pml is the same
// protocol for the model checker.
//
// The outcome of (step, incarnation) is a function of the votes alone: committed if every rank
// sealed, aborted if some rank did not. So an agent that was killed and started again decides the
// same from repeated votes. No I/O, no clock.
//
// Threads: one at a time (the agent's loop).
// Errors:  misuse throws InvalidArgument. Votes and outcomes that are late, repeated or for unknown
//          steps are harmless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "snapshot/commit/commit_key.h"

namespace reft {

class CommitLedger {
 public:
  static constexpr size_t kRemembered = 64;  // keys, open and decided together, per incarnation
  static constexpr size_t kIncarnations = 4;

  struct Action {
    enum Kind : uint8_t {
      kBroadcast,  // send every local rank the outcome (yes = committed)
      kAnswer,     // send only `rank` the outcome: it voted again
      kNodeVote,   // send local rank 0 the node's vote (yes = every local rank sealed)
    };
    Kind kind;
    CommitKey key;
    bool yes = false;
    int rank = -1;
    // kNodeVote: the ranks' parts combined; outcomes: not 0 if the cut is why the step was aborted.
    uint64_t cut = 0;
    // kNodeVote: the greatest of the node's ranks; outcomes: the job's, for a committed step.
    uint8_t proposal = 0;
    // kNodeVote: the ranks' parts added up; outcomes: not 0 if the replicas are why the step was
    // aborted.
    uint64_t replicas = 0;
    bool plan_anew = false;  // a vote asked for it, or the replicas did not agree
  };

  // A vote, or what a vault holds for a key. Sealed: with the rank's parts of the consistent-cut
  // check (intercept/record/cut.h) and of the check that replicas agree
  // (snapshot/state/agreement.h), and its proposal for the cadence (snapshot/cost/cadence.h; here
  // it is a number that one rank sets and all ranks receive). Sealed or not, it may ask for a new
  // plan of all ranks (plan_rounds.h).
  struct Held {
    bool sealed = false;
    uint64_t cut = 0;
    uint8_t proposal = 0;
    uint64_t replicas = 0;
    bool plan_anew = false;
  };
  // The decision about a step; the other fields as in Action.
  struct Outcome {
    bool committed = false;
    uint64_t cut = 0;
    uint8_t proposal = 0;
    uint64_t replicas = 0;
    bool plan_anew = false;
  };
  // What the vault of `rank` holds for `key` now; nullopt if the vault is unknown or unreadable.
  // The ledger calls it only for ranks whose vote is missing.
  using HoldsSealed = std::function<std::optional<Held>(int rank, const CommitKey& key)>;

  explicit CommitLedger(HoldsSealed holds_sealed = nullptr);

  // How many votes an incarnation needs. With more than one node the outcome comes from outside,
  // through jobOutcome(). Earlier votes count. Repeated calls replace. Throws InvalidArgument if
  // local_world < 1.
  std::vector<Action> expect(uint64_t incarnation, int local_world, bool multi_node);

  // A vote. The first vote of a rank for a key stays. A vote for a later step of the same
  // incarnation shows that the rank has finished all earlier ones. If its vote for one of those is
  // missing (this agent was started in between), the vault decides: holds sealed → sealed, else
  // dropped. A step is aborted, too, whose ranks sealed at points of the program that do not belong
  // together, or whose replicas do not agree: no restart could use it.
  std::vector<Action> vote(int rank, const CommitKey& key, const Held& vote);

  // The sealed slots of a vault that this agent received: votes that an earlier agent may have had.
  std::vector<Action> vaultHolds(int rank, const std::vector<std::pair<CommitKey, Held>>& sealed);

  // Whether the step has its outcome.
  bool isDecided(const CommitKey& key) const;
  // Takes back the votes of these ranks that nothing depends on yet: they sealed, and neither the
  // node has voted nor the step an outcome. The caller passes them to vote() again later.
  struct Vote {
    int rank = 0;
    CommitKey key;
    Held held;
  };
  std::vector<Vote> takeBack(uint64_t incarnation, const std::set<int>& ranks);

  // The decision of a job of several nodes.
  std::vector<Action> jobOutcome(const CommitKey& key, const Outcome& outcome);

  struct Counters {
    uint64_t committed = 0, aborted = 0, repeated = 0, inferred = 0, inconsistent = 0, parted = 0;
  };
  const Counters& counters() const { return counters_; }
  // Newest committed key that this ledger decided or received.
  std::optional<CommitKey> newestCommitted() const { return newest_committed_; }
  // Keys without an outcome, with the number of votes so far.
  std::vector<std::pair<CommitKey, size_t>> open() const;

 private:
  struct Ballots {
    std::map<int, Held> votes;  // by rank
    bool node_voted = false;
    std::optional<Outcome> outcome;
  };
  struct Incarnation {
    uint64_t id = 0;
    int local_world = 0;  // 0: unknown so far
    bool multi_node = false;
    std::map<int64_t, Ballots> steps;
  };
  Incarnation& incarnation(uint64_t id);
  void record(Incarnation& inc, int rank, int64_t step, const Held& vote,
              std::vector<Action>& actions);
  void decide(Incarnation& inc, int64_t step, std::vector<Action>& actions);
  void settle(Incarnation& inc, int64_t step, Ballots& ballots, const Outcome& outcome,
              std::vector<Action>& actions);
  static Action tell(Action::Kind kind, const CommitKey& key, const Outcome& outcome,
                     int rank = -1);

  HoldsSealed holds_sealed_;
  std::deque<Incarnation> incarnations_;  // newest last
  Counters counters_;
  std::optional<CommitKey> newest_committed_;
};

}  // namespace reft
