// Decides behind which point of the training stream the chunks of a snapshot are copied, so that the device itself begins them when it
// stands idle: the host has run ahead by then, and could not.
//
// What the host tells (DeviceMarks) becomes orders: "so many bytes behind this wait". What does not fit into the gaps that are foretold
// is ordered at once, because the copy stream then has the whole step for it; so is everything under `eager` and `sync`. The device's own
// times of these marks, read later without waiting, go into a Placer (placer.h), which learns the schedule, the rate and the guard from
// them, and foresees the next step; and into records of the steps as they were (device_step.h). A step of which marks are missing is not
// learnt; a step that goes another way than foretold leaves its orders to the gate.
//
// Threads: any, under a lock of its own; nothing in here waits. Errors: none are thrown besides std::bad_alloc. After a call of the
//          driver that fails nothing is learnt any more (and DeviceCopy, which made it, copies nothing any more).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "intercept/base/clock.h"
#include "intercept/base/device_marks.h"
#include "snapshot/device_clock.h"
#include "snapshot/device_copy.h"
#include "snapshot/device_step.h"
#include "snapshot/placer.h"

namespace reft {

class DevicePlacement {
 public:
  // All have to outlive it.
  DevicePlacement(DeviceCopy& copy, DeviceMarks& marks, const Clock& host = SteadyClock::instance());
  ~DevicePlacement();  // nothing is marked any more
  DevicePlacement(const DevicePlacement&) = delete;
  DevicePlacement& operator=(const DevicePlacement&) = delete;

  // -- by the thread that trains --

  // The program point of `step` on `stream`: a step begins. False: that stream cannot be followed.
  bool point(const DeviceStream& stream, int64_t step);
  // The step that has begun has a snapshot, of which `bytes` are to be copied besides what is not ordered here. nullopt: nothing before
  // the gate.
  void begin(std::optional<PlacementPolicy> policy, uint64_t chunk_bytes, uint64_t bytes);
  // Nothing more is to be said of the program point, at which the host was so long. `block`: see control_steps.h.
  void pointDone(uint64_t block, bool beside_copy, int64_t begin_ns, int64_t end_ns);
  // What makes the stream wait for copies before the optimizer lies between these two. The first ones of a step count; waits are
  // not marked any more after it.
  void gateBegin(const DeviceStream& stream);
  void gateEnd(const DeviceStream& stream);

  // -- by whoever asks for copies --

  struct Order {
    uint64_t bytes = 0;
    Tier tier = Tier::kCompute;
    std::optional<uint32_t> behind = std::nullopt;  // a mark; nullopt: at once
    size_t wait = 0;                 // of the step
    int64_t step = 0;
  };
  // What may be ordered by now. The caller asks for the copies and tells of each what became of it. When a step takes a tenth longer than
  // foretold, the rest is to be copied at once: it may hang in a wait that was not foretold, and its snapshot is the newest one.
  std::optional<Order> next(int64_t step);
  // When to ask again, by the host's clock, if nothing happens meanwhile.
  int64_t nextLookNs() const;
  // For the copy stream: marks that are recorded before and behind the copies of an order. nullopt: there is none.
  std::optional<uint32_t> takeMark() { return marks_.take(); }
  cuda::Event event(uint32_t mark) const { return marks_.event(mark); }
  // `bytes` were asked for, between two such marks.
  void ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> begin, std::optional<uint32_t> end);

  // -- by one thread --

  // Takes in what the device has passed meanwhile.
  void learn();
  // Steps that the device has ended since the last call, in order.
  std::vector<DeviceStep> takeSteps();
  // Bytes of which nobody knows when they were copied, by what they were ordered as, since the last call.
  std::array<uint64_t, kTiers> takeUntimed();

  ScheduleModel::Errors errors() const;
  int64_t longestOverrunNs() const;

 private:
  // As the host knows it.
  struct Begun {
    int64_t step = 0;
    uint64_t lost = 0;  // marks, before it
    bool told = false;  // all of the program point
    uint64_t block = 0;
    bool beside_copy = false;
    int64_t point_begin_ns = 0, point_end_ns = 0;  // of the host
    uint64_t chunk_bytes = 0;
    uint64_t bytes = 0;  // 0: no snapshot
  };
  struct Batch {
    Order order;  // with the bytes that were asked for
    uint32_t begin = 0, end = 0;
  };

  void hear();
  bool learnOne();
  bool learnPoint(const OpEvent& mark, int64_t at_ns);
  bool settleBatches(int64_t step, size_t wait);
  void endStep(const Begun& next, int64_t at_ns);
  void drop(const Batch& batch);
  void reset();

  DeviceCopy& copy_;
  DeviceMarks& marks_;
  const Clock& host_;
  DeviceClock clock_;
  mutable std::mutex mutex_;
  Placer placer_;
  PlacementPlan plan_;

  // Ahead of the device.
  DeviceStream stream_;
  std::deque<Begun> begun_;  // oldest first: the step that the device's times have come to, and those behind it
  bool in_step_ = false;     // its program point was heard of
  bool gated_ = false;       // its gate, too
  size_t waits_begun_ = 0;   // since then
  uint64_t unordered_ = 0;   // bytes that are planned for waits which have not begun
  std::deque<Order> orders_;
  // Behind the device.
  std::deque<OpEvent> told_;    // marks whose time is not known
  std::deque<Batch> batches_;   // asked for, and not known to have landed
  std::optional<Begun> now_;    // the step that the device's times have come to
  DeviceStep record_;           // of it, in times of the device
  bool gate_known_ = false;
  size_t waits_ended_ = 0;
  DeviceWait wait_;  // the newest one
  std::vector<DeviceStep> steps_;
  std::array<uint64_t, kTiers> untimed_{};
};

}  // namespace reft
