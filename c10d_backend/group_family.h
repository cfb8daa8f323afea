// The groups that come from a group: children made by split, merge and shrink.
//
// Each child is a ReftBackend over children of the parent's inner backends. Where gloo's child
// cannot come from the parent's gloo, `BackendParts::make_cpu` makes it.
//
// Threads: any. Errors: exceptions of the inner backends pass unchanged.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "c10d_backend/compat.h"
#include "intercept/base/mutex.h"
#include "intercept/record/op_log.h"

namespace reft {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

// What a ReftBackend is made of.
struct BackendParts {
  // Makes the CPU backend of a child group where it cannot be split off the parent's.
  using CpuFactory =
      std::function<BackendPtr(const StorePtr& store, int rank, int size,
                               std::chrono::milliseconds timeout, const std::string& group)>;

  BackendPtr cpu;  // one of the two may be null: the other then gets all tensors
  BackendPtr cuda;
  StorePtr store;            // of the inner backends: keys that no other attempt of the job sees
  std::string store_prefix;  // turns a store that arrives later (split, merge) into such a store
  std::string group_name;
  CpuFactory make_cpu;
};

class GroupFamily {
 public:
  // `parts` and `log` must outlive the family.
  GroupFamily(const BackendParts& parts, OpLog& log, int rank)
      : parts_(parts), log_(log), rank_(rank) {}

  // As the virtuals of c10d::Backend; `timeout` is for a CPU backend that make_cpu makes.
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks, const OptionsPtr& opts,
                   std::chrono::milliseconds timeout);
  BackendPtr merge(const StorePtr& store, const OptionsPtr& opts, int rank, int size,
                   std::chrono::milliseconds timeout);
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                    const OptionsPtr& opts_override, std::chrono::milliseconds timeout);

  uint64_t splitCount() const { return split_count_.load(); }

 private:
  StorePtr ownStore(const std::string& key, const StorePtr& store) const;
  BackendPtr child(BackendPtr cpu, BackendPtr cuda, int rank, int size, StorePtr store,
                   const std::string& name) const;

  const BackendParts& parts_;
  OpLog& log_;
  const int rank_;
  Mutex mutex_;  // held while a split runs
  // By name: torch calls split() once per device type, and gets the same child each time.
  std::map<std::string, c10::weak_intrusive_ptr<c10d::Backend>> children_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> split_count_{0};
  std::atomic<uint64_t> shrink_count_{0};
};

}  // namespace reft
