// What the engine reports: the counters and the note of RankStats, the span log, and log lines
// under `reft.snapshot`. The engine writes to these through this class alone.
//
// Threads: any. Counters are relaxed atomics; the note is written under a lock, and a reader in
// another process may see it torn. Per chunk only copied() runs: no lock, no log line.
// Errors: none.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "intercept/base/mutex.h"
#include "snapshot/cost/cost.h"
#include "snapshot/device/device_step.h"
#include "snapshot/device/device_tracker.h"
#include "snapshot/engine/snapshot_plan.h"
#include "snapshot/placement/placer.h"
#include "snapshot/vault/writer.h"

namespace reft {

class Telemetry {
 public:
  // `vault` outlives it.
  Telemetry(Vault& vault, uint64_t incarnation);

  // The table of `plan` is in use; slots take `slot_bytes` together.
  void planned(const SnapshotPlan& plan, uint64_t slot_bytes);
  void point(int64_t step, int64_t since_ns, int64_t now_ns);
  void cost(const Cost::Figures& figures);

  // -- life of a snapshot --
  void skipped(int64_t step, const std::string& why);
  // The engine could not do what it was asked for.
  void failed(const std::string& what);
  void began(int64_t step, uint64_t object_bytes);
  void captured(int64_t step, int64_t begin_ns, int64_t end_ns, uint64_t object_bytes);
  void onDevices() { stats_.on_device.store(1); }
  // A chunk, or several that follow each other on one thread.
  void copied(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns, uint64_t bytes);
  // A chunk whose tier the device reports later.
  void copiedUntimed(uint64_t bytes);
  void gated(int64_t step, int64_t begin_ns, int64_t waited_ns);
  void sealed(int64_t step);
  void dropped(int64_t step, const std::string& why);
  void moved();  // the snapshot was dropped because memory of a region moved, or went
  // A thread begins to seal or to drop the snapshot. Returns what finished() takes.
  uint64_t finishing(int64_t step, int64_t now_ns);
  // `copy_ns`: added up over the copy threads.
  void finished(uint64_t finishing, int64_t now_ns, bool sealed, int64_t copy_ns);
  void committed(int64_t step, int64_t now_ns);
  void notCommitted(int64_t step, bool cut_at_fault, bool replicas_at_fault);
  // What a person should know next.
  void note(const std::string& text);

  void unprotected(bool now) { stats_.unprotected.store(now ? 1 : 0); }
  void forecast(const ScheduleModel::Errors& errors);
  void opEventsLost(uint64_t lost) { stats_.op_events_lost.store(lost); }
  // What the device did.
  void device(const DeviceTracker::Learned& learned);

 private:
  void extendCopySpan(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns, uint64_t bytes);
  void countTier(Tier tier, uint64_t bytes);
  void deviceStep(const DeviceStep& step);

  Vault& vault_;
  RankStats& stats_;
  Mutex note_mutex_;  // of the note
};

}  // namespace reft
