// Decides behind which point of the training stream the chunks of a snapshot are copied, so that
// the device itself begins them when it stands idle: the host has run ahead by then, and could not.
//
// What the host marks on that stream (DeviceMarks) becomes orders: "so many bytes behind this
// wait". What does not fit into the gaps that are foretold is ordered at once, because the copy
// stream then has the whole step for it; so is everything under `eager` and `sync`. A step that
// goes another way than foretold leaves its orders to the gate. What the device then did is learnt
// behind it (device_learner.h), and makes the plan for the next step.
//
// Threads: learn(), takeSteps(), takeUntimed() and errors() from one thread at a time. The rest
// from any, under a lock that is held for
//          no more than a mark. Nothing in here waits.
// Errors:  none are thrown besides std::bad_alloc. After a call of the driver that fails nothing is
// ordered or learnt any more (and
//          DeviceCopy, which made it, copies nothing any more).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "intercept/base/clock.h"
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

  // The program point of `step` on `stream`: a step begins. False: that stream cannot be followed.
  bool point(const DeviceStream& stream, int64_t step);
  // The step that has begun has a snapshot, of which `bytes` are to be copied besides what is not
  // ordered here. nullopt: nothing before the gate.
  void begin(std::optional<PlacementPolicy> policy, uint64_t chunk_bytes, uint64_t bytes);
  // Nothing more is to be said of the program point, at which the host was so long. `block`: see
  // control_steps.h.
  void pointDone(uint64_t block, bool beside_copy, int64_t begin_ns, int64_t end_ns);
  // What makes the stream wait for copies before the optimizer lies between these two. The first
  // ones of a step count; waits are not marked any more after it.
  void gateBegin(const DeviceStream& stream);
  void gateEnd(const DeviceStream& stream);

  // -- by whoever asks for copies --

  struct Order {
    uint64_t bytes = 0;
    Tier tier = Tier::kCompute;
    std::optional<uint32_t> behind = std::nullopt;  // a mark; nullopt: at once
    size_t wait = 0;                                // of the step
    int64_t step = 0;
  };
  // What may be ordered by now. The caller asks for the copies and tells of each what became of it.
  // When a step takes a tenth longer than foretold, what is left for waits that have not begun is
  // to be copied at once: none of them may come.
  std::optional<Order> next(int64_t step);
  // When to ask again, by the host's clock, if nothing happens meanwhile.
  int64_t nextLookNs() const;
  // For the copy stream: marks that are recorded before and behind the copies of an order. nullopt:
  // there is none.
  std::optional<uint32_t> takeMark() { return marks_.take(); }
  cuda::Event event(uint32_t mark) const { return marks_.event(mark); }
  // `bytes` were asked for, between two such marks.
  void ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> begin,
               std::optional<uint32_t> end);

  // -- by one thread --

  // Takes in what the device has passed meanwhile.
  void learn();
  // See DeviceLearner.
  std::vector<DeviceStep> takeSteps() { return learner_.takeSteps(); }
  std::array<uint64_t, kTiers> takeUntimed();
  ScheduleModel::Errors errors() const { return learner_.placer().model().errors(); }
  int64_t longestOverrunNs() const { return learner_.placer().longestOverrunNs(); }

 private:
  // What the learner knows about the steps to come.
  struct Foresight {
    PlacementPlan plan;
    uint64_t bytes = 0;  // that are planned
    int64_t until_gate_ns = 0;
    int64_t step = -1;  // that the device is in
    int64_t began_ns = 0;
  };

  void hear();
  void tellBegun();

  DeviceCopy& copy_;
  DeviceMarks& marks_;
  const Clock& host_;
  DeviceLearner learner_;  // of the thread that learns

  mutable std::mutex mutex_;
  bool failed_ = false;
  Foresight foresight_;
  std::optional<DeviceLearner::Begun> now_;  // the host's step, until all is said of it
  int64_t step_ = -1;                        // its number
  bool in_step_ = false;                     // its program point was heard of
  bool gated_ = false;                       // its gate was marked
  size_t depth_ = 0;                         // waits that are open
  size_t waits_begun_ = 0;                   // in it, those inside of others not counted
  std::vector<uint64_t> gap_bytes_;          // planned, by wait
  uint64_t unordered_ = 0;                   // of these, for waits that have not begun
  std::deque<Order> orders_;
  // For the learner.
  std::vector<DeviceLearner::Begun> begun_;
  std::vector<OpEvent> told_;
  std::vector<DeviceLearner::Batch> batches_;
  std::array<uint64_t, kTiers> untimed_{};
};

}  // namespace reft
