// The commit exchange between nodes: one vote per node and step, counted in the job's store.
//
// `sealed/<step>` counts nodes whose ranks all sealed. The node that completes the count writes
// `outcome/<step>` = 1; a node with a dropped snapshot writes 0. Every node votes once, so both
// cannot happen. All nodes read the outcome, and with it the cadence that one node proposed
// (`marks/<step>`, only with a limit on the overhead). The node that completed a step deletes the
// keys of old steps, so the store does not grow.
//
// Threads: vote() from any. One thread, `reft-commit`, uses the store over a connection of its own,
//          because a store client serves one request at a time and training must not queue behind
//          it. The destructor joins.
// Errors:  none leave the thread: without the store nothing is committed and training continues;
// the
//          alarm reports it.
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
