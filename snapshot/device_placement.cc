#include "snapshot/device_placement.h"

#include <algorithm>

namespace reft {

DevicePlacement::DevicePlacement(DeviceCopy& copy, DeviceWaits& waits)
    : copy_(copy), waits_(waits), placer_(PlacerOptions{}), lost_(waits.lost()) {
  OpEvent mark;
  while (waits_.poll(mark)) {  // of an engine before this one
    waits_.giveBack(mark.mark);
  }
}

DevicePlacement::~DevicePlacement() {
  hear();
  reset();
  if (base_) {
    waits_.giveBack(*base_);
  }
}

ScheduleModel::Errors DevicePlacement::errors() const {
  const std::lock_guard lock(mutex_);
  return placer_.model().errors();
}
int64_t DevicePlacement::longestOverrunNs() const {
  const std::lock_guard lock(mutex_);
  return placer_.longestOverrunNs();
}

// -- ahead of the device ------------------------------------------------------------------------------------------------

bool DevicePlacement::begin(const DeviceStream& stream, int64_t step, uint64_t chunk_bytes, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (failed_ || !copy_.watch(waits_, stream)) {
    return false;
  }
  device_ = stream.device;
  hear();
  orders_.clear();  // of a step that went another way
  now_ = {step, chunk_bytes, bytes, waits_.lost()};
  in_step_ = false;
  if (steps_.size() == DeviceWaits::kEvents) {
    steps_.pop_front();  // the device is far behind, or no mark can be made
  }
  steps_.push_back(now_);
  copy_.mark(waits_, {.what = OpEvent::kSnapshot, .ticket = static_cast<uint64_t>(step)}, stream);
  plan_ = placer_.foresee(bytes, /*past_the_guard=*/true);
  uint64_t in_gaps = 0;
  for (const uint64_t gap : plan_.gap_bytes) {
    in_gaps += gap;
  }
  if (in_gaps < bytes) {
    orders_.push_back({bytes - in_gaps, Tier::kCompute, std::nullopt, 0});
  }
  return true;
}

// Under the mutex.
void DevicePlacement::hear() {
  OpEvent mark;
  while (waits_.poll(mark)) {
    marks_.push_back(mark);
    if (mark.what == OpEvent::kSnapshot) {
      in_step_ = static_cast<int64_t>(mark.ticket) == now_.step;
      waits_begun_ = 0;
    } else if (mark.what == OpEvent::kWaitBegin && in_step_) {
      const size_t wait = waits_begun_++;
      if (wait < plan_.gap_bytes.size() && plan_.gap_bytes[wait] > 0) {
        orders_.push_back({plan_.gap_bytes[wait], Tier::kGap, mark.mark, wait});
      }
    }
  }
}

std::optional<DevicePlacement::Order> DevicePlacement::next(int64_t step) {
  const std::lock_guard lock(mutex_);
  hear();
  if (step != now_.step || orders_.empty()) {
    return std::nullopt;
  }
  const Order order = orders_.front();
  orders_.pop_front();
  return order;
}

void DevicePlacement::ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> end) {
  const std::lock_guard lock(mutex_);
  if (!end) {
    return;
  }
  Order done = order;
  done.bytes = bytes;
  batches_.push_back({now_.step, done, *end});
}

// -- behind the device --------------------------------------------------------------------------------------------------

// False: the device has not come to it, or nothing is to be had from it any more.
bool DevicePlacement::timeOf(uint32_t mark, int64_t& at_ns) {
  const std::optional<bool> passed = copy_.passed(device_, waits_.event(mark));
  int64_t since_base_ns = 0;
  failed_ =
      !passed || (*passed && base_ && !copy_.elapsed(device_, waits_.event(*base_), waits_.event(mark), since_base_ns));
  at_ns = base_ns_ + since_base_ns;
  return !failed_ && *passed;
}

// Tells the Placer of the copies of a step that were to be made in its waits up to `wait`. False: one has not landed.
bool DevicePlacement::settleBatches(int64_t step, size_t wait) {
  while (!batches_.empty()) {
    const Batch& batch = batches_.front();
    if (batch.step > step || (batch.step == step && batch.order.tier == Tier::kGap && batch.order.wait > wait)) {
      return true;
    }
    int64_t end_ns = 0;
    if (!timeOf(batch.end, end_ns)) {
      return false;
    }
    const int64_t earliest = batch.order.tier == Tier::kGap ? wait_begin_ns_ : base_ns_;
    if (batch.step == step) {
      placer_.copied(batch.order.bytes, batch.order.tier, std::min(std::max(earliest, copied_until_ns_), end_ns),
                     end_ns);
    }
    copied_until_ns_ = end_ns;
    waits_.giveBack(batch.end);
    batches_.pop_front();
  }
  return true;
}

bool DevicePlacement::learnOne() {
  if (marks_.empty()) {
    return false;
  }
  const OpEvent mark = marks_.front();
  int64_t at_ns = 0;
  if (!timeOf(mark.mark, at_ns)) {
    return false;
  }
  switch (mark.what) {
    case OpEvent::kSnapshot: {
      if (!settleBatches(learning_, ~size_t{0})) {
        return false;
      }
      while (!steps_.empty() && steps_.front().step < static_cast<int64_t>(mark.ticket)) {
        steps_.pop_front();  // its program point was lost
      }
      const bool known = !steps_.empty() && steps_.front().step == static_cast<int64_t>(mark.ticket);
      const uint64_t lost = known ? steps_.front().lost : ~uint64_t{0};
      placer_.beginStep(at_ns, 0, 0, /*learn=*/lost == lost_);
      lost_ = lost;
      if (known) {
        placer_.take(PlacementPolicy::kGap, steps_.front().chunk_bytes, at_ns, steps_.front().bytes, 0);
        steps_.pop_front();
      }
      learning_ = static_cast<int64_t>(mark.ticket);
      waits_ended_ = 0;
      if (base_) {
        waits_.giveBack(*base_);
      }
      base_ = mark.mark;
      base_ns_ = at_ns;
      marks_.pop_front();
      return true;
    }
    case OpEvent::kWaitBegin:
      placer_.waitBegin(scheduleOp(mark.kind, mark.group, mark.peer, mark.tag, mark.bytes, mark.signature), at_ns);
      wait_begin_ns_ = at_ns;
      break;
    case OpEvent::kWaitEnd: {
      if (placer_.model().waiting()) {
        placer_.waitEnd(at_ns);
      }
      if (!settleBatches(learning_, waits_ended_)) {
        return false;
      }
      ++waits_ended_;
      break;
    }
    case OpEvent::kGate: gate_begin_ns_ = at_ns; break;
    case OpEvent::kDone: placer_.gateDone(gate_begin_ns_, at_ns); break;
    case OpEvent::kBegin: break;
  }
  waits_.giveBack(mark.mark);
  marks_.pop_front();
  return true;
}

void DevicePlacement::learn() {
  const std::lock_guard lock(mutex_);
  hear();
  // A mark that copies are still to be ordered behind is not given back.
  const auto behind = [](const Order& order) { return order.behind.has_value(); };
  if (std::none_of(orders_.begin(), orders_.end(), behind)) {
    while (!failed_ && learnOne()) {
    }
  }
  if (failed_) {
    reset();
  }
}

// The device's times are not to be had any more. Under the mutex.
void DevicePlacement::reset() {
  waits_.ignore();
  orders_.clear();
  for (const OpEvent& mark : marks_) {
    waits_.giveBack(mark.mark);
  }
  for (const Batch& batch : batches_) {
    waits_.giveBack(batch.end);
  }
  marks_.clear();
  batches_.clear();
  steps_.clear();
}

}  // namespace reft
