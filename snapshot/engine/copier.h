// Copies the chunks of one snapshot into its slot and hashes them. Two implementations: HostCopier,
// whose regions lie in host memory, and DeviceCopier, whose regions lie (also) on CUDA devices.
// tests/contract/copier holds both to the same rules.
//
// Both lie beside the engine, above the device room: that room knows streams and copies, but no
// snapshots.
//
// Threads: two kinds. The thread that trains calls way(), atPoint() and gate(); place() runs on the
// first copy thread; copyNext(), copyRest() and hasWork() on any, also at the same time.
// Errors: none are thrown. A copy that fails fails its job, and the rest of the chunks are counted
// as done without being copied.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>

#include "intercept/base/clock.h"
#include "intercept/record/device_marks.h"
#include "intercept/record/op_events.h"
#include "snapshot/placement/op_listener.h"
#include "snapshot/placement/placer.h"
#include "snapshot/vault/writer.h"

namespace reft {

class SnapshotJob;
class Telemetry;

// What copiers share with the engine, for all of its snapshots.
struct CopyContext {
  Vault& vault;
  Telemetry& telemetry;
  const Clock& clock;
  OpEvents& events;
  OpListener& listener;  // of the first copy thread

  std::function<void(SnapshotJob&)> all_copied;  // the last chunk has been copied; any thread
  std::function<void()> call_helpers;            // the job was released
  std::function<void()> expect_replays;          // the thread that trains captures into a graph

  std::atomic<Tier> tier{Tier::kCompute};  // that the first copy thread was granted last
  std::atomic<bool> stopping{false};
  std::atomic<bool> attention{false};  // there is news for the first copy thread

  void wake() {
    attention.store(true);
    events.wake();
  }
};

class Copier {
 public:
  // What capture() wants of the snapshot.
  struct Wanted {
    PlacementPolicy policy = PlacementPolicy::kEager;
    bool control = false;  // no copy beside the step
    bool gated = true;     // gate() runs before the state is written again
    bool replays = false;  // graphs may write the state without a gate
  };
  // What the copier can do of it.
  struct Way {
    PlacementPolicy policy = PlacementPolicy::kEager;
    bool control = false;
  };
  // Receives the bytes that a call of copyNext() copied.
  using Sink = std::function<void(uint64_t bytes, Tier tier)>;

  Copier(CopyContext& context, SnapshotJob& job) : context_(context), job_(job) {}
  virtual ~Copier() = default;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  virtual Way way(const Wanted& wanted) const = 0;
  // Whether gate() returns only when all is copied. False: the streams that train wait instead.
  virtual bool hostWaits() const = 0;
  // Whether copies begin when they are foretold to cost nothing, so that only the first copy thread
  // makes them, until the job is released.
  virtual bool placed() const = 0;

  // Copies, or enqueues, what the next forward may write, under `sync` everything. The job has its
  // policy, and no other thread knows it yet.
  virtual void atPoint() = 0;
  // Before the optimizer writes. `streams`: those that train; empty: those of the capture. Compares
  // the versions, and leaves nothing to be copied that the optimizer could overwrite.
  virtual void gate(std::span<const DeviceStream> streams) = 0;

  // Copies the next chunk. False: all chunks are taken.
  virtual bool copyNext(Tier tier, const Sink& sink) = 0;
  bool copyNext(Tier tier) { return copyNext(tier, Sink()); }
  // All that is left, now.
  void copyRest();
  // Until all chunks are taken, each as the placement grants it.
  virtual void place();
  // Whether chunks are to be copied, or to be awaited.
  virtual bool hasWork() const;
  bool done() const { return left_.load() == 0; }

  // Lets all threads copy.
  void release(bool at_gate);

 protected:
  // A chunk of those in left_ is through; the last one ends the copy.
  void chunkDone();

  CopyContext& context_;
  SnapshotJob& job_;
  std::atomic<uint64_t> next_{0};  // chunk
  std::atomic<uint64_t> left_{0};  // chunks that are not through, and what travels beside them
};

}  // namespace reft
