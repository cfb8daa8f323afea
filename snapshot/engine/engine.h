// The snapshot engine of one rank: takes the state at the program point of a step, copies it into
// the vault while the next step is computed, and seals it. ARCHITECTURE.md, "Life of a snapshot",
// is the sequence.
//
// When its chunks are copied is decided by an OpListener (REFT_SNAPSHOT_POLICY): as soon as
// possible, in the rank's gaps, or before capture() returns. The first copy thread asks it between
// chunks; the others help when nothing is held back: under `eager`, and at the gate. The training
// thread never waits for a decision.
//
// Between capture() and the return of the next gate() the memory at `addresses` must stay mapped.
// It may be written (that is what verification is for), but then the snapshot is dropped and
// counted.
//
// It measures what snapshots cost (overhead_meter.h): beginPoint() and endPoint() bracket what is
// done at a program point. A control step's snapshot is copied before capture() returns; from a
// device, at the gate. With regions on a device it is the device's time that counts; with regions
// on several ones nothing is measured.
//
// Threads: setTable, beginPoint, capture, endPoint, check, gate, settle, takeLateWritten and drain
// belong to the training thread.
//          outcome() may come from any thread. The engine owns the threads `reft-copy`; its
//          destructor stops and joins them (an unfinished snapshot is left unsealed).
// Errors:  no failure of a snapshot throws: it is counted in RankStats, described in its note, and
// capture() says so.
//          setTable throws SystemError when memory for the slots cannot be had; the engine then
//          takes no snapshots.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "intercept/base/clock.h"
#include "intercept/link/wire.h"
#include "intercept/record/op_events.h"
#include "snapshot/commit/slot_book.h"
#include "snapshot/cost/cadence.h"
#include "snapshot/cost/control_steps.h"
#include "snapshot/cost/overhead_meter.h"
#include "snapshot/device/device_copy.h"
#include "snapshot/device/device_placement.h"
#include "snapshot/device/device_step.h"
#include "snapshot/placement/placer.h"
#include "snapshot/state/table.h"
#include "snapshot/vault/writer.h"

namespace reft {

class OpListener;

// Version counters of the regions, in table order. Called from copy threads: no lock, no GIL.
class VersionReader {
 public:
  virtual ~VersionReader() = default;
  virtual uint64_t version(size_t region) const noexcept = 0;
};

struct EngineOptions {
  int rank = 0;
  uint64_t incarnation = 1;
  uint32_t copy_threads = 1;
  PlacementPolicy policy = PlacementPolicy::kEager;  // all but kPaper
  // What the ops of this process do, by the same clock; has to outlive the engine. nullptr: nothing
  // is known of them.
  OpEvents* events = nullptr;
  // Asks for a call of check() by the training thread when it is next between two ops; false:
  // cannot. From `reft-copy`. Without it the counters are trusted as they are when the last chunk
  // has been copied.
  std::function<bool()> ask_check;
  bool verify_full = false;  // hash everything at capture instead of samples
  CadenceOptions
      cadence;  // which steps have a snapshot; what capture() is called for is taken all the same
  uint32_t control_every = 0;  // steps of a block with one control step; 0: none
  std::chrono::nanoseconds slot_wait{std::chrono::seconds(5)};
  uint64_t object_bytes = uint64_t{256} << 10;  // first capacity of a slot's object area
  // How long settle() and capture() wait for copies from a device. The device may be a whole step
  // behind the host, and a host that waits for it costs nothing, so only a device that hangs makes
  // this pass.
  std::chrono::nanoseconds device_wait{std::chrono::minutes(5)};
  const CudaApi* cuda = nullptr;  // for regions on devices; nullptr: this process's
  // What the stream that trains comes past, for regions on a device; has to outlive the engine.
  // nullptr: copies are asked for at once, and nothing is known of the device's times.
  DeviceMarks* device_marks = nullptr;
  // When `ops_begun` moves and nothing was committed for so long, training is unprotected and is
  // told so. 0: never.
  std::chrono::nanoseconds alarm{0};
  std::function<uint64_t()> ops_begun;
  std::function<void(bool unprotected)> on_alarm;  // from `reft-copy`
};

// Bytes of the objects that still lie on a device.
struct ObjectPart {
  const void* from = nullptr;
  int device = 0;
  uint64_t offset = 0;  // in the objects
  uint64_t bytes = 0;
};

struct CaptureInput {
  int64_t step = 0;
  std::span<const void* const> addresses;  // one per region of the table
  std::shared_ptr<const VersionReader> versions;
  std::string_view objects;
  // Are put into the objects before the snapshot is sealed. Their devices are among those of
  // `streams`; what these streams, and `writers`, are asked for after capture() comes behind the
  // copy.
  std::span<const ObjectPart> parts = {};
  // Others of the same devices: copies come behind what they were asked for before.
  std::span<const DeviceStream> writers = {};
  uint64_t cut = 0;       // CutCounter::value() at the program point
  bool checkable = true;  // `ask_check` reaches the thread that trains
  bool gated = true;      // gate() is called before the state is written again
  std::span<const int> devices =
      {};  // where the addresses are valid, -1: on the host; empty: all on the host
  std::span<const DeviceStream> streams = {};  // those that train, one for each device in `devices`
};

enum class CaptureResult { kTaken, kNoSlot, kNoTable, kFailed };

class SnapshotEngine {
 public:
  using VoteSink = std::function<void(const wire::Ballot&)>;

  SnapshotEngine(EngineOptions options, Vault& vault, VoteSink vote,
                 const Clock& clock = SteadyClock::instance());
  ~SnapshotEngine();

  // The slot holds the snapshot that this job was restored from.
  void adopt(uint32_t slot, int64_t step, uint64_t incarnation);

  // A new plan: waits for a running copy, then makes the slots fit (touches all of their memory;
  // slow, once). Slots that still hold a needed snapshot are grown when they become free.
  void setTable(SnapshotTable table);
  bool hasTable() const { return plan_ != nullptr; }

  // At the program point of `step`, before anything else: ends the measured step. Whether this one
  // has a snapshot: capture() is then to be called. May wait for the outcome of the one before, as
  // capture() does. `streams`: as in CaptureInput.
  bool beginPoint(int64_t step, std::span<const DeviceStream> streams = {});
  // At its end: the next step begins.
  void endPoint();

  // At the program point of `step`, which must grow (kFailed). Copies objects and early regions
  // before it returns. Without a free slot it waits up to `slot_wait`, once: until the next outcome
  // further captures give up immediately. After the first, waits in vain take at most a hundredth
  // of the run: ranks that do not count the same steps would wait for each other.
  CaptureResult capture(const CaptureInput& input);
  // Instead of capture(): there is no snapshot of `step`, because the optimizer's step is captured
  // into a graph, whose replays will write the state without a gate.
  void leaveOut(int64_t step);

  // Takes effect with the next capture. From any thread.
  void setPolicy(PlacementPolicy policy) { policy_.store(policy); }
  PlacementPolicy policy() const { return policy_.load(); }

  // By the training thread, between two ops: whether anything was written since the program point.
  // Then the snapshot is sealed.
  void check();

  // Before the next optimizer step: returns when all is copied and its versions were compared,
  // helping with the copy. A copy thread seals it then. Returns nanoseconds waited. With regions on
  // devices it is `streams` that wait (as in CaptureInput; empty: those of the capture), not the
  // host.
  int64_t gate(std::span<const DeviceStream> streams = {});
  // Copies from a device are under way: its memory must not be let go, even after the gate.
  bool busyOnDevice();

  // Returns when nothing is under way: what was captured is sealed or dropped, by this thread if no
  // other has begun. False: a device has not finished after `device_wait`.
  bool settle();

  // From the agent.
  void outcome(const wire::Ballot& ballot);

  // Settles. Regions that were written between the program point and their copy, since the last
  // call: to be made early.
  std::vector<uint32_t> takeLateWritten();

  int64_t committedStep() const { return committed_step_.load(); }
  // Waits until the newest captured snapshot is committed or aborted, or the deadline has passed.
  // True: settled.
  bool drain(std::chrono::milliseconds timeout);

 private:
  struct Plan;
  struct Job;
  struct Fetched;

  bool settleWithin(std::chrono::nanoseconds most);
  bool decideOn(int64_t step);
  bool awaitOutcome(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready);
  void tellOverhead();
  void expectReplays();
  void decide();
  void help();
  void checkAlarm();
  void place(Job& job);
  void tellForecast(const ScheduleModel::Errors& errors);
  void work(Job& job);
  // False: all chunks are taken.
  template <typename Copied>
  bool copyNext(Job& job, Tier tier, Copied copied);
  uint64_t copyChunk(Job& job, uint64_t chunk, Tier tier);
  void countCopy(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns, uint64_t bytes);
  void extendCopySpan(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns, uint64_t bytes);
  std::shared_ptr<Job> finishCopy(std::span<const DeviceStream> streams);
  void chunkDone(Job& job);
  void release(Job& job, bool at_gate);
  void allCopied(Job& job);
  static void compareVersions(Job& job);
  void finish(Job& job);
  void note(const std::string& text);
  void vote(int64_t step, uint64_t cut, bool sealed, uint8_t wish = 0);
  void skip(int64_t step, const std::string& why);
  void sample(Job& job, const CaptureInput& input);
  bool prepareSlot(int slot, const Plan& plan, size_t object_bytes);

  // engine_device.cc: regions on devices.
  std::string beginOnDevices(std::span<const DeviceStream> streams);
  bool pinSlot(int slot);
  void fetchAtPoint(Job& job);
  bool fetchAside(Job& job);
  void landAside(Job& job);
  bool fetchChunk(Job& job, Fetched& fetched);
  bool fetch(Fetched& fetched, int device, const std::byte* from, std::byte* to, uint64_t bytes);
  void submit(Job& job, Fetched& fetched, bool fine);
  std::optional<Fetched> fetchNext(Job& job, Tier tier);
  uint64_t land(Job& job, const Fetched& fetched);
  bool awaitLanding(const Fetched& fetched);
  void holdTraining(Job& job, std::span<const DeviceStream> streams);
  void pointOnDevice(int64_t step, std::span<const DeviceStream> streams);
  void placeOnDevice(Job& job);
  void fetchOrdered(Job& job, bool limited);
  uint64_t fetchBatch(Job& job, const DevicePlacement::Order& order, uint64_t bytes, bool limited);
  bool landNext(Job& job);
  bool fetchOne(Job& job, Tier tier);
  static Fetched takeFetched(Job& job);
  bool hasLanded(const Fetched& fetched) const;
  void markGate(std::span<const DeviceStream> streams, const std::function<void()>& hold);
  void learnOfDevice();
  void measureDevice();
  void tellStep(const DeviceStep& step);
  void countTier(Tier tier, uint64_t bytes);

  EngineOptions options_;
  Vault& vault_;
  VoteSink vote_;
  const Clock& clock_;

  std::unique_ptr<OpEvents> own_events_;  // if the owner has none
  OpEvents& events_;
  std::unique_ptr<OpListener> placement_;    // of the first copy thread
  std::unique_ptr<DeviceCopy> device_copy_;  // made by the first capture with regions on a device
  std::byte* aside_memory_ =
      nullptr;  // of device_copy_, for what is no chunk, one snapshot at a time
  size_t aside_bytes_ = 0;
  std::unique_ptr<DevicePlacement>
      device_placement_;  // by the first program point after it, if they are on one device
  std::atomic<PlacementPolicy> policy_;
  std::atomic<bool> attention_{false};  // there is something new for the first copy thread
  std::atomic<Tier> tier_now_{Tier::kCompute};

  std::mutex mutex_;
  std::condition_variable help_wanted_;
  std::condition_variable changed_;  // job finished, outcome arrived
  SlotBook book_;
  Cadence cadence_;
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Job> job_;
  std::vector<uint32_t> late_;
  int64_t newest_captured_ = -1;
  int64_t newest_settled_ = -1;
  std::atomic<int64_t> committed_step_{-1};
  bool starved_ = false;  // a capture waited for a slot in vain, and no outcome has come since
  int64_t waited_in_vain_ns_ = 0;
  std::atomic<bool> stopping_{false};  // set under the mutex
  int64_t started_ns_ = 0;
  int64_t protected_ns_ = 0;  // newest commit, or the start
  int64_t protected_step_ =
      0;  // newest commit, or what this process was restored from; under mutex_
  uint64_t ops_at_alarm_check_ = 0;
  bool unprotected_ = false;
  std::vector<DeviceStep> device_steps_;  // for the meter
  // Of the training thread.
  ControlSteps control_steps_;
  OverheadMeter meter_;
  uint64_t block_ = 0;          // of the step that runs
  int64_t point_begin_ns_ = 0;  // newest program point; 0: none yet
  int64_t point_end_ns_ = 0;
  bool beside_copy_ = false;  // the step that runs
  bool on_device_ = false;    // a snapshot had regions on devices
  bool replays_ = false;      // graphs were captured that may write the state without a gate
  bool at_point_ = false;     // between beginPoint() and endPoint()
  int64_t marked_step_ = -1;  // whose program point is marked on its device
  DeviceStream marked_;       // and where
  std::vector<DeviceStream> stepped_;  // streams that came to a gate and may still be used
  AfterGate after_gate_;               // of the device's usual steps
  uint64_t measured_every_ = 1;        // that the meter measures
  uint64_t blocks_told_ = 0;
  bool control_ = false;  // the step that begins at this point
  std::vector<std::thread> threads_;
};

}  // namespace reft
