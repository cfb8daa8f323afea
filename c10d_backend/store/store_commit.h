// The commit exchange between nodes: one vote per node and step, counted in the job's store.
//
// `sealed/<step>` counts nodes whose ranks all sealed; the node that completes the count writes
// `outcome/<step>` = 1, a node with a dropped snapshot writes 0 (every node votes once, so both
// cannot happen). Everybody reads the outcome, and beside it the wish for the cadence that one of
// the nodes voted with (`marks/<step>`, only while there is a limit on the overhead). Keys of old
// steps are deleted by the node that completed them, so the store does not grow.
//
// Threads: vote() from any; one thread `reft-commit` talks to the store over a connection of its
// own, because a store client
//          serves one request at a time and training must not wait behind ours. The destructor
//          joins.
// Errors:  none leave the thread: without the store nothing is committed, and training goes on (the
// alarm says so).
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "intercept/base/mutex.h"
#include "intercept/link/wire.h"

namespace reft {

class StoreCommit {
 public:
  using Decided = std::function<void(const wire::Ballot& outcome)>;  // from `reft-commit`

  // `store`: keys that no other attempt of the job sees.
  StoreCommit(const c10::intrusive_ptr<c10d::Store>& store, int nodes, Decided decided);
  ~StoreCommit();
  StoreCommit(const StoreCommit&) = delete;
  StoreCommit& operator=(const StoreCommit&) = delete;

  void vote(const wire::Ballot& node_vote);

 private:
  void run();
  void cast(const wire::Ballot& ballot);
  void await(wire::Ballot ballot);
  bool stopsWithin(std::chrono::microseconds pause) EXCLUDES(mutex_);

  c10::intrusive_ptr<c10d::Store> store_;
  const int nodes_;
  Decided decided_;
  Mutex mutex_;
  ConditionVariable arrived_;
  std::deque<wire::Ballot> votes_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace reft
