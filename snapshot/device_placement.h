// Decides behind which point of the training stream the chunks of a snapshot are copied, so that the device itself begins them when it
// stands idle: the host has run ahead by then, and could not.
//
// What the host tells (DeviceWaits) becomes orders: "so many bytes behind this wait". What does not fit into the gaps that are foretold
// is ordered at once, because the copy stream then has the whole step for it. The device's own times of these marks, read later
// without waiting, go into a Placer (placer.h), which learns the schedule, the rate and the guard from them, and foresees the next
// step. A step of which marks are missing is not learnt; a step that goes another way than foretold leaves its orders to the gate.
//
// Times are of the device, nanoseconds since the first program point.
//
// Threads: any, under a lock of its own; nothing in here waits. Errors: none are thrown besides std::bad_alloc. After a call of the
//          driver that fails nothing is learnt any more (and DeviceCopy, which made it, copies nothing any more).
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "intercept/base/device_waits.h"
#include "snapshot/device_copy.h"
#include "snapshot/placer.h"

namespace reft {

class DevicePlacement {
 public:
  // Both have to outlive it.
  DevicePlacement(DeviceCopy& copy, DeviceWaits& waits);
  ~DevicePlacement();  // nobody watches any more
  DevicePlacement(const DevicePlacement&) = delete;
  DevicePlacement& operator=(const DevicePlacement&) = delete;

  struct Order {
    uint64_t bytes = 0;
    Tier tier = Tier::kCompute;
    std::optional<uint32_t> behind;  // a mark; nullopt: at once
    size_t wait = 0;                 // of the step
  };

  // At the program point of a snapshot, on `stream`: begins its step. False: there is no watching that stream.
  bool begin(const DeviceStream& stream, int64_t step, uint64_t chunk_bytes, uint64_t bytes);
  // What may be ordered by now. The caller asks for the copies and tells of each order what became of it.
  std::optional<Order> next(int64_t step);
  // `bytes` were asked for; `end`: a mark that was recorded behind them (nullopt: there is none).
  void ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> end);
  // Takes in what the device has passed meanwhile.
  void learn();

  cuda::Event event(uint32_t mark) const { return waits_.event(mark); }
  std::optional<uint32_t> takeMark() { return waits_.take(); }
  ScheduleModel::Errors errors() const;
  int64_t longestOverrunNs() const;

 private:
  struct Step {
    int64_t step = 0;
    uint64_t chunk_bytes = 0;
    uint64_t bytes = 0;
    uint64_t lost = 0;
  };
  struct Batch {
    int64_t step = 0;
    Order order;
    uint32_t end = 0;
  };

  void hear();
  bool timeOf(uint32_t mark, int64_t& at_ns);
  bool learnOne();
  bool settleBatches(int64_t step, size_t wait);
  void reset();

  DeviceCopy& copy_;
  DeviceWaits& waits_;
  int device_ = -1;
  mutable std::mutex mutex_;
  bool failed_ = false;
  Placer placer_;
  PlacementPlan plan_;

  // Ahead of the device.
  Step now_;
  bool in_step_ = false;    // its program point was heard of
  size_t waits_begun_ = 0;  // since then
  std::deque<Order> orders_;
  // Behind the device.
  std::deque<OpEvent> marks_;     // told, and their time is not known
  std::deque<Step> steps_;        // that began, and whose program point is not known to have been passed
  std::deque<Batch> batches_;     // asked for, and not known to have landed
  std::optional<uint32_t> base_;  // of all times: the newest program point that was passed
  int64_t base_ns_ = 0;
  int64_t learning_ = -1;  // step that the device's times have come to
  size_t waits_ended_ = 0;
  int64_t wait_begin_ns_ = 0;
  int64_t copied_until_ns_ = 0;
  int64_t gate_begin_ns_ = 0;
  uint64_t lost_ = 0;
};

}  // namespace reft
