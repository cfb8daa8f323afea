// The commit exchange between nodes: one vote per node and step, through the job's store.
//
// Votes go up a tree, of which no node has more than 32 below it. A node whose ranks all sealed
// adds the votes from below to its own, deletes them, and writes `vote/<step>/<node>`; the first
// node writes `outcome/<step>` instead. A node with a dropped snapshot writes there that it was
// dropped, and no vote: so both cannot happen. All nodes read the outcome, and with it the cadence
// that one node proposed and whether a vote asked for a new plan. The last one deletes it
// (`read/<step>` counts), so the store does not grow, and no node waits for an outcome that another
// one deleted. A vote that comes again, because an agent was started anew, is answered from memory.
//
// So each node makes some operations a step, beside polls, however many nodes there are. Polls slow
// down with the number of nodes.
//
// Votes and outcomes are sealed (intercept/link/value_seal.h): only a rank of this attempt
// can commit a step. Where a vote or an outcome is not sealed, the step is aborted.
//
// Threads: vote() from any. One thread, `reft-commit`, uses the store over a connection of its own,
//          because a store client serves one request at a time and training must not queue behind
//          it. The destructor waits for it a short time: a store whose process is stopped never
//          answers, and the thread is then abandoned. In a forked child nothing happens.
// Errors:  none leave the thread: without the store nothing is committed and training continues;
//          the alarm reports it.
#pragma once

#include <functional>
#include <memory>

#include <sys/types.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "intercept/link/value_seal.h"
#include "intercept/link/wire.h"

namespace reft {

class StoreCommit {
 public:
  // From `reft-commit`. Owns what it uses: an abandoned thread may call it after the destructor.
  using Decided = std::function<void(const wire::Ballot& outcome)>;

  struct Place {
    int node = 0;
    int nodes = 1;
  };

  // `store`: keys that no other attempt of the job sees.
  StoreCommit(const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<const ValueSeal> seal,
              Place place, Decided decided);
  ~StoreCommit();
  StoreCommit(const StoreCommit&) = delete;
  StoreCommit& operator=(const StoreCommit&) = delete;

  void vote(const wire::Ballot& node_vote);

 private:
  class Worker;
  const pid_t owner_;
  std::shared_ptr<Worker> worker_;
};

}  // namespace reft
