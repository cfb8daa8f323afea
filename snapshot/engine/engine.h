// The snapshot engine of one rank: takes the state at the program point of a step, has it copied
// into the vault while the next step computes, seals the copy and votes for it. It sequences; the
// work is done by its parts. ARCHITECTURE.md, "Life of a snapshot", is the sequence.
//
// Threads: the thread that trains calls setTable, beginPoint, capture, leaveOut, passOver,
// endPoint, check, gate, busyOnDevice, settle, giveBack, takeLateWritten and drain; outcome,
// setPolicy and committedStep come from any. The engine owns the threads `reft-copy`
// (copy_threads.h); the destructor joins them and leaves an unfinished snapshot unsealed.
// Errors:  setTable throws SystemError without memory for the slots; then there are no snapshots. A
// snapshot that fails throws nothing: RankStats counts and describes it, capture() returns it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "intercept/base/clock.h"
#include "intercept/base/mutex.h"
#include "intercept/link/wire.h"
#include "snapshot/commit/meeting_points.h"
#include "snapshot/commit/plan_rounds.h"
#include "snapshot/commit/slot_book.h"
#include "snapshot/cost/cost.h"
#include "snapshot/device/device_tracker.h"
#include "snapshot/engine/alarm.h"
#include "snapshot/engine/capture_input.h"
#include "snapshot/engine/copier.h"
#include "snapshot/engine/copy_threads.h"
#include "snapshot/engine/engine_options.h"
#include "snapshot/engine/patience.h"
#include "snapshot/engine/snapshot_job.h"
#include "snapshot/engine/telemetry.h"

namespace reft {

class SnapshotEngine {
 public:
  using VoteSink = std::function<void(const wire::Ballot&)>;

  SnapshotEngine(EngineOptions options, Vault& vault, VoteSink vote,
                 const Clock& clock = SteadyClock::instance());
  ~SnapshotEngine();

  // The slot holds the snapshot that this job was restored from.
  void adopt(uint32_t slot, int64_t step, uint64_t incarnation);
  // Settles, then makes the slots fit a new table (touches all of their memory; slow, once); those
  // that hold a needed snapshot grow later. `plan_anew`: the votes ask all ranks to plan.
  void setTable(SnapshotTable table, bool plan_anew = false);
  bool hasTable() const;
  // Makes parities of state on these devices possible, as in CaptureInput; before a table that has
  // some. False: DeviceXor::hindrance() says why, or the device has failed.
  bool prepareParities(std::span<const int> devices);

  // The program point of `step` begins. True: capture() is to be called. May wait for the outcome
  // of the snapshot before. `streams`: as in CaptureInput.
  bool beginPoint(int64_t step, std::span<const DeviceStream> streams = {});
  void endPoint();
  // At a program point for which beginPoint() returned true.
  PlanRound planRound() const;

  // At the program point of `step`, which must grow (kFailed). Waits for a free slot (patience.h),
  // copies objects and early regions. A write to a region before the gate drops the snapshot.
  CaptureResult capture(const CaptureInput& input);
  // Instead of capture(): the optimizer's step is captured into a graph. Replays have no gate.
  void leaveOut(int64_t step);
  // Instead of capture(): there is no snapshot of `step`, because of `why`.
  void passOver(int64_t step, const std::string& why, bool plan_anew);
  // Takes effect with the next capture.
  void setPolicy(PlacementPolicy policy) { policy_.store(policy); }
  PlacementPolicy policy() const { return policy_.load(); }
  // What is stored changes: its cost is measured from here. `slot_wait`: as
  // EngineOptions::slot_wait, from now on.
  void protectionChanged(std::chrono::nanoseconds slot_wait);
  // Whether snapshots cost more than the limit on the overhead at the longest interval.
  bool exceedsAtLongest() const;

  // Between two ops: was anything written since the program point? Seals or drops the snapshot.
  void check();
  // Before the next optimizer step: waits until all is copied and its versions are compared; with
  // regions on devices, `streams` wait (empty: those of the capture). Returns nanoseconds waited.
  int64_t gate(std::span<const DeviceStream> streams = {});
  // Whether copies from a device are under way: its memory stays allocated, after the gate too.
  bool busyOnDevice();
  // Seals or drops every snapshot. False: a device has not finished after `device_wait`.
  bool settle() { return settleWithin(options_.device_wait); }

  // Ends snapshots. Returns the bytes given back: of slots that no restart needs, or of all.
  uint64_t giveBack(bool everything);

  // From the agent.
  void outcome(const wire::Ballot& ballot);
  // Settles. Regions that were written before their copy since the last call: early from now on.
  std::vector<uint32_t> takeLateWritten();
  int64_t committedStep() const { return committed_step_.load(); }
  // Waits until the newest captured snapshot is committed or aborted. False: `timeout` has passed.
  bool drain(std::chrono::milliseconds timeout);

 private:
  // -- program point --
  bool decide(int64_t step);
  bool awaitOutcome(const std::function<bool()>& ready) REQUIRES(mutex_);
  std::string beginOnDevice(const CaptureInput& input);
  CaptureResult claimSlot(const CaptureInput& input, const std::string& hindrance,
                          SnapshotJob::Place& place);
  bool prepareSlot(const CaptureInput& input, const SnapshotJob::Place& place);
  void returnSlot(int slot);
  std::shared_ptr<SnapshotJob> makeJob(const CaptureInput& input, const SnapshotJob::Place& place);
  void startCopy(const std::shared_ptr<SnapshotJob>& job);
  void expectReplays();

  // -- until the vote --
  std::shared_ptr<SnapshotJob> finishCopy(std::span<const DeviceStream> streams);
  void allCopied(SnapshotJob& job);
  bool settleWithin(std::chrono::nanoseconds most);
  void finish(SnapshotJob& job);
  void skip(int64_t step, const std::string& why, bool plan_anew = false);
  // Claims a slot for a step; `why_not`: why there is none.
  std::optional<int> acquireSlot(int64_t step, std::string& why_not) REQUIRES(mutex_);
  void voteAgainst(int64_t step, bool plan_anew = false);
  void vote(wire::Ballot ballot);

  // -- first copy thread --
  void learnOfDevice();
  int64_t idle();  // returns when to call it again
  void checkAlarm();

  const EngineOptions options_;
  Vault& vault_;
  const VoteSink vote_;
  const Clock& clock_;
  const std::unique_ptr<OpEvents> own_events_;  // if the options have none
  Telemetry telemetry_;
  OpListener listener_;  // of the first copy thread
  CopyContext context_;
  DeviceTracker tracker_;
  std::atomic<PlacementPolicy> policy_;
  std::atomic<int64_t> committed_step_{-1};

  mutable Mutex mutex_;
  ConditionVariable changed_;  // a job finished, or an outcome arrived
  SlotBook book_ GUARDED_BY(mutex_);
  Cost cost_ GUARDED_BY(mutex_);
  Alarm alarm_ GUARDED_BY(mutex_);
  std::chrono::nanoseconds slot_wait_ GUARDED_BY(mutex_);
  Patience patience_ GUARDED_BY(mutex_);
  PlanRounds rounds_ GUARDED_BY(mutex_);
  MeetingPoints meeting_ GUARDED_BY(mutex_);
  std::shared_ptr<const SnapshotPlan> plan_ GUARDED_BY(mutex_);
  std::vector<uint32_t> late_ GUARDED_BY(mutex_);  // for takeLateWritten()
  int64_t newest_captured_ GUARDED_BY(mutex_) = -1;
  int64_t newest_settled_ GUARDED_BY(mutex_) = -1;

  CopyThreads threads_;  // last: they use all of the above
};

}  // namespace reft
