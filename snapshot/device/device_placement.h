// Decides behind which point of the training stream the chunks of a snapshot are copied. The device
// begins each copy itself when it comes to that point and idles; the host is far ahead by then.
//
// Marks that the host records on that stream (DeviceMarks) become orders: "so many bytes behind
// this wait". Bytes that do not fit into the foretold gaps are ordered at once, so that the copy
// stream has the whole step for them; so is everything under `eager` and `sync`. A step that goes
// another way than foretold leaves its orders to the gate. device_learner.h learns, behind the
// device, what it did, and makes the plan for the next step.
//
// Threads: learn(), takeSteps(), takeUntimed() and errors() from one thread at a time. The rest
// from any, under a lock that is held for no longer than a mark takes. No call waits. Errors: none
// are thrown besides std::bad_alloc. After a failed call of the driver it orders and learns nothing
// any more (and DeviceCopy, which made the call, copies nothing any more).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "intercept/base/clock.h"
#include "intercept/base/mutex.h"
#include "intercept/record/device_marks.h"
#include "snapshot/device/device_copy.h"
#include "snapshot/device/device_learner.h"
#include "snapshot/device/device_step.h"
#include "snapshot/placement/placer.h"

namespace reft {

class DevicePlacement {
 public:
  // All have to outlive it.
  DevicePlacement(DeviceCopy& copy, DeviceMarks& marks,
                  const Clock& host = SteadyClock::instance());
  ~DevicePlacement();  // nothing is marked any more
  DevicePlacement(const DevicePlacement&) = delete;
  DevicePlacement& operator=(const DevicePlacement&) = delete;

  // -- by the thread that trains --

  // The program point of `step` on `stream`: a step begins. False: the stream cannot be followed.
  bool point(const DeviceStream& stream, int64_t step);
  // The step has a snapshot, of which `bytes` are to be ordered here. `policy` nullopt: none before
  // the gate.
  void begin(std::optional<PlacementPolicy> policy, uint64_t chunk_bytes, uint64_t bytes);
  // The host leaves the program point. `block`: see control_steps.h.
  void pointDone(uint64_t block, bool beside_copy, int64_t begin_ns, int64_t end_ns);
  // Around the work that makes the stream wait for copies before the optimizer. The first pair of a
  // step counts and ends the marking of waits.
  void gateBegin(const DeviceStream& stream);
  void gateEnd(const DeviceStream& stream);

  // -- by the thread that enqueues copies --

  struct Order {
    uint64_t bytes = 0;
    Tier tier = Tier::kCompute;
    std::optional<uint32_t> behind = std::nullopt;  // a mark; nullopt: at once
    size_t wait = 0;                                // of the step
    int64_t step = 0;
  };
  // The next copies that are due. The caller enqueues them and reports each batch with ordered().
  // When a step takes a tenth longer than foretold, the bytes left for waits that have not begun
  // become due at once: none of these waits may come.
  std::optional<Order> next(int64_t step);
  // When to call next() again, by the host's clock, if no mark comes before.
  int64_t nextLookNs() const;
  // A mark to record on the copy stream before or behind the copies of an order. nullopt: the pool
  // is empty.
  std::optional<uint32_t> takeMark() { return marks_.take(); }
  cuda::Event event(uint32_t mark) const { return marks_.event(mark); }
  // `bytes` were enqueued between two such marks.
  void ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> begin,
               std::optional<uint32_t> end);

  // -- by one thread --

  // Learns from what the device has passed since the last call.
  void learn();
  // See DeviceLearner.
  std::vector<DeviceStep> takeSteps() { return learner_.takeSteps(); }
  std::array<uint64_t, kTiers> takeUntimed();
  ScheduleModel::Errors errors() const { return learner_.placer().model().errors(); }
  int64_t longestOverrunNs() const { return learner_.placer().longestOverrunNs(); }

 private:
  // The learner's forecast of the steps to come.
  struct Foresight {
    PlacementPlan plan;
    uint64_t bytes = 0;  // planned
    int64_t until_gate_ns = 0;
    int64_t step = -1;  // the device's
    int64_t began_ns = 0;
  };

  void pollMarks() REQUIRES(mutex_);
  // All is known of the host's step: the learner gets it.
  void publishBegun() REQUIRES(mutex_);

  DeviceCopy& copy_;
  DeviceMarks& marks_;
  const Clock& host_;
  DeviceLearner learner_;  // of the thread that learns

  mutable Mutex mutex_;
  bool failed_ GUARDED_BY(mutex_) = false;
  Foresight foresight_ GUARDED_BY(mutex_);
  // The host's step, until publishBegun().
  std::optional<DeviceLearner::Begun> now_ GUARDED_BY(mutex_);
  int64_t step_ GUARDED_BY(mutex_) = -1;                // number of the host's step
  bool in_step_ GUARDED_BY(mutex_) = false;             // the mark of its program point was polled
  bool gated_ GUARDED_BY(mutex_) = false;               // its gate was marked
  size_t depth_ GUARDED_BY(mutex_) = 0;                 // open waits
  size_t waits_begun_ GUARDED_BY(mutex_) = 0;           // in the step, without nested ones
  std::vector<uint64_t> gap_bytes_ GUARDED_BY(mutex_);  // planned, by wait
  uint64_t unordered_ GUARDED_BY(mutex_) = 0;  // bytes of gap_bytes_ whose waits have not begun
  std::deque<Order> orders_ GUARDED_BY(mutex_);
  // For the learner.
  std::vector<DeviceLearner::Begun> begun_ GUARDED_BY(mutex_);
  std::vector<OpEvent> polled_ GUARDED_BY(mutex_);
  std::vector<DeviceLearner::Batch> batches_ GUARDED_BY(mutex_);
  std::array<uint64_t, kTiers> untimed_ GUARDED_BY(mutex_){};
};

}  // namespace reft
