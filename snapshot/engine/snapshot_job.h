// One snapshot under way, from its program point to its vote: what is copied where, and how far it
// is.
//
//   copying ─┬─ compared ─┬─ checked ── sealing ─┬─ sealed
//            └─ copied ───┘                      └─ dropped
//
// copying: chunks are missing. compared: so they are, but the version counters were compared
// already (behind the gate of a device). copied: the counters are still to be compared. checked:
// nothing in live memory is needed any more. sealing: one thread has claimed it. sealed, dropped:
// the rank has voted.
//
// Threads: the plain members are set by the thread that trains before another thread knows the job,
// but for `group_digests`. The rest from any; each method names its own rule.
// Errors: a transition that is not in the table throws InvalidArgument; no caller can cause one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "intercept/base/mutex.h"
#include "snapshot/engine/capture_input.h"
#include "snapshot/engine/snapshot_plan.h"
#include "snapshot/engine/verify.h"
#include "snapshot/placement/placer.h"

namespace reft {

class Copier;

class SnapshotJob {
 public:
  enum class State : uint8_t {
    kCopying,
    kCompared,
    kCopied,
    kChecked,
    kSealing,
    kSealed,
    kDropped
  };
  static constexpr size_t kStates = 7;
  static bool allowed(State from, State to);
  static const char* name(State state);

  struct Place {
    std::shared_ptr<const SnapshotPlan> plan;
    int slot = -1;
    uint8_t proposal = 0;  // that its vote carries
  };

  // Takes the samples of the program point. Fails if a region has moved since the caller read its
  // address.
  SnapshotJob(const Place& place, const CaptureInput& input, bool verify_full);
  ~SnapshotJob();
  SnapshotJob(const SnapshotJob&) = delete;
  SnapshotJob& operator=(const SnapshotJob&) = delete;

  const std::shared_ptr<const SnapshotPlan> plan;
  const int64_t step;
  const uint32_t slot;
  const uint8_t proposal;
  const uint64_t cut;
  const int node;  // NUMA node of the thread that trains
  const bool checkable;
  const std::vector<const std::byte*> addresses;  // of the regions
  // Also written by the thread that lands lines of replicas, before it counts them as copied.
  std::vector<uint64_t> group_digests;
  Verify verify;
  PlacementPolicy policy = PlacementPolicy::kEager;
  bool control = false;  // its step runs without a copy beside it
  std::unique_ptr<Copier> copier;
  std::atomic<int64_t> copy_ns{0};
  bool given_up = false;  // the thread that trains: has waited too long for its device, once

  // The snapshot will be dropped: copiers do no more than they must.
  void fail() { failed_.store(true); }
  bool failed() const { return failed_.load(); }
  // All threads copy, nothing is held back for a better moment.
  void release() { released_.store(true); }
  bool released() const { return released_.load(); }
  // The optimizer is about to write.
  void reachGate() { at_gate_.store(true); }
  bool atGate() const { return at_gate_.load(); }

  // -- transitions; each returns whether the job has become checked by this call --

  // The last chunk has been copied. `between_ops`: the counters can be compared now.
  bool allCopied(bool between_ops) EXCLUDES(mutex_);
  // The thread that trains is between two ops: compares the counters if all is copied.
  bool check() EXCLUDES(mutex_);
  // Compares the counters, unless that was done. From here on training writes behind the copies.
  bool compare() EXCLUDES(mutex_);

  // True for one caller, once the job is checked: it seals or drops the snapshot.
  bool claim() EXCLUDES(mutex_);
  // The caller, who has claimed the job, sealed or dropped the snapshot and has voted.
  void finish(bool sealed) EXCLUDES(mutex_);

  // Whether live memory is not needed any more.
  bool checked() const EXCLUDES(mutex_);
  State state() const EXCLUDES(mutex_);
  // Returns when the last chunk has been copied.
  void awaitCopied() EXCLUDES(mutex_);
  // Returns when the snapshot is sealed or dropped; the second form returns false after `most`.
  void awaitFinished() EXCLUDES(mutex_);
  bool awaitFinished(std::chrono::nanoseconds most) EXCLUDES(mutex_);

 private:
  void sample(const CaptureInput& input);
  void to(State next) REQUIRES(mutex_);
  bool isCopied() const REQUIRES(mutex_);
  bool isFinished() const REQUIRES(mutex_);

  std::atomic<bool> failed_{false};
  std::atomic<bool> released_{false};
  std::atomic<bool> at_gate_{false};

  mutable Mutex mutex_;
  ConditionVariable changed_;
  State state_ GUARDED_BY(mutex_) = State::kCopying;
};

}  // namespace reft
