// Votes that wait until a copy of their snapshot is on another node: a step is committed only when
// the loss of this node would be survived, as the banner promises.
//
// Votes pass in the order of their steps. Those for later steps wait, too, also of ranks that have
// no slot for these: what counts votes takes one for a step that lies far behind for one that was
// answered long ago, and its slot would never be free again.
//
// A keeper that does not answer may not end protection against all else, nor slow it down: once no
// byte has moved for `patience`, or a vote has waited for `longest`, votes go on without it, at
// once from then on, until a copy arrives again.
//
// state() is what the caller reports on the terminal: whether the loss of this node is survived
// now.
//
// Threads: one at a time. Errors: none.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "snapshot/commit/commit_ledger.h"

namespace reft::agent {

class CopyGate {
 public:
  using Vote = CommitLedger::Vote;

  // Copies of this node's snapshots of the attempt.
  enum class State : uint8_t {
    kFresh,    // none is needed, or training has not gone on without one yet
    kLate,     // training is a step further, and no step is committed: copies are under way
    kMissing,  // the newest committed step is not on another node
    kThere,    // the newest committed step is on another node
  };

  CopyGate(int64_t patience_ns, int64_t longest_ns)
      : patience_ns_(patience_ns), longest_ns_(longest_ns) {}

  // The votes of these ranks of an attempt wait from now on, and those of others no longer; those
  // that still do of another attempt never will be counted. Returns the ranks whose votes did not
  // wait before: some may have been counted by now.
  std::set<int> expect(std::set<int> ranks, uint64_t incarnation);
  // True: the vote has to wait, or does already.
  bool take(const Vote& vote, int64_t now_ns);
  // Whether a vote of the rank waits.
  bool waits(int rank, const CommitKey& key) const { return waiting_.contains({key, rank}); }

  // The slot of a key is on another node.
  void copied(int rank, const CommitKey& key);
  // The step has an outcome: nothing waits for it any more.
  void decided(const CommitKey& key, bool committed);
  // The votes that need wait no longer.
  std::vector<Vote> ready();
  // A keeper cannot take copies: all votes that wait.
  std::vector<Vote> failed();
  // Bytes of copies move: the network is slow, and not gone.
  void moved(int64_t now_ns) { moved_ns_ = now_ns; }
  // Votes that have waited long enough.
  std::vector<Vote> tick(int64_t now_ns);
  // Copies do not arrive: votes pass without them.
  bool isBehind() const { return behind_; }
  State state() const { return state_; }

 private:
  struct Waiting {
    Vote vote;
    int64_t since_ns = 0;
    bool is_ready = false;  // it is for a step without a snapshot, or its copy is there
  };
  int64_t patience_ns_, longest_ns_;
  int64_t moved_ns_ = 0;
  std::set<int> ranks_;
  uint64_t incarnation_ = 0;
  bool behind_ = false;
  State state_ = State::kFresh;
  int64_t uncopied_ = -1;  // the newest step of the attempt that a vote passed for without a copy
  std::map<std::pair<CommitKey, int>, Waiting> waiting_;
};

}  // namespace reft::agent
