#include "snapshot/device/device_placement.h"

#include <algorithm>
#include <utility>

namespace reft {

namespace {

constexpr double kLate = 1.1;  // times the forecast time until the gate
constexpr int64_t kLeastLookNs = 100'000'000;

}  // namespace

DevicePlacement::DevicePlacement(DeviceCopy& copy, DeviceMarks& marks, const Clock& host)
    : copy_(copy), marks_(marks), host_(host), learner_(copy, marks, host) {
  OpEvent mark;
  while (marks_.poll(mark)) {  // of an engine before this one
    marks_.giveBack(mark.mark);
  }
}

DevicePlacement::~DevicePlacement() {
  marks_.forget();
  pollMarks();
  for (const OpEvent& mark : polled_) {
    marks_.giveBack(mark.mark);
  }
  for (const DeviceLearner::Batch& batch : batches_) {
    marks_.giveBack(batch.begin);
    marks_.giveBack(batch.end);
  }
}

bool DevicePlacement::point(const DeviceStream& stream, int64_t step) {
  const MutexLock lock(mutex_);
  if (failed_ || !copy_.follow(marks_, stream)) {
    return false;
  }
  pollMarks();
  publishBegun();
  orders_.clear();  // of a step that went another way
  gap_bytes_.clear();
  unordered_ = 0;
  marks_.ignore();
  in_step_ = gated_ = false;
  step_ = step;
  now_ = DeviceLearner::Begun{.step = step, .device = stream.device, .lost = marks_.lost()};
  copy_.mark(
      marks_,
      {.what = OpEvent::kBegin, .kind = OpKind::kStep, .ticket = static_cast<uint64_t>(step)},
      stream);
  return true;
}

void DevicePlacement::begin(std::optional<PlacementPolicy> policy, uint64_t chunk_bytes,
                            uint64_t bytes) {
  const MutexLock lock(mutex_);
  if (failed_ || !now_) {
    return;
  }
  now_->chunk_bytes = chunk_bytes;
  now_->bytes = bytes;
  marks_.watch();
  if (!policy) {
    return;
  }
  if (policy == PlacementPolicy::kGap && foresight_.bytes == bytes) {
    gap_bytes_ = foresight_.plan.gap_bytes;
    for (const uint64_t gap : gap_bytes_) {
      unordered_ += gap;
    }
  }
  if (unordered_ < bytes) {
    const Tier tier = policy == PlacementPolicy::kSync ? Tier::kAtOnce : Tier::kCompute;
    orders_.push_back({.bytes = bytes - unordered_, .tier = tier, .step = step_});
  }
}

void DevicePlacement::pointDone(uint64_t block, bool beside_copy, int64_t begin_ns,
                                int64_t end_ns) {
  const MutexLock lock(mutex_);
  if (now_) {
    now_->block = block;
    now_->beside_copy = beside_copy;
    now_->point_begin_ns = begin_ns;
    now_->point_end_ns = end_ns;
    publishBegun();
  }
}

void DevicePlacement::publishBegun() {
  if (now_ && !failed_) {
    begun_.push_back(*now_);
  }
  now_.reset();
}

void DevicePlacement::pollMarks() {
  OpEvent mark;
  while (marks_.poll(mark)) {
    polled_.push_back(mark);
    if (mark.what == OpEvent::kBegin) {
      in_step_ = static_cast<int64_t>(mark.ticket) == step_;
      depth_ = waits_begun_ = 0;
    } else if (mark.what == OpEvent::kWaitBegin && depth_++ == 0 && in_step_) {
      const size_t wait = waits_begun_++;
      if (wait < gap_bytes_.size() && gap_bytes_[wait] > 0) {
        orders_.push_back({gap_bytes_[wait], Tier::kGap, mark.mark, wait, step_});
        unordered_ -= gap_bytes_[wait];
      }
    } else if (mark.what == OpEvent::kWaitEnd) {
      depth_ -= depth_ > 0 ? 1 : 0;
    }
  }
}

void DevicePlacement::gateBegin(const DeviceStream& stream) {
  const MutexLock lock(mutex_);
  if (!failed_ && !gated_ && step_ >= 0) {
    copy_.mark(marks_, {.what = OpEvent::kGate}, stream);
  }
}

void DevicePlacement::gateEnd(const DeviceStream& stream) {
  const MutexLock lock(mutex_);
  if (failed_ || gated_ || step_ < 0) {
    return;
  }
  copy_.mark(marks_, {.what = OpEvent::kDone}, stream);
  gated_ = true;
  publishBegun();
  marks_.ignore();
  pollMarks();
  orders_.clear();  // the gate has enqueued the rest
  unordered_ = 0;
}

std::optional<DevicePlacement::Order> DevicePlacement::next(int64_t step) {
  const MutexLock lock(mutex_);
  pollMarks();
  const bool there = step == step_ && foresight_.step == step;
  if (there && unordered_ > 0 && foresight_.until_gate_ns > 0 &&
      host_.nowNs() >
          foresight_.began_ns +
              static_cast<int64_t>(kLate * static_cast<double>(foresight_.until_gate_ns))) {
    orders_.push_back(
        {.bytes = std::exchange(unordered_, 0), .tier = Tier::kCompute, .step = step});
    gap_bytes_.clear();
  }
  if (orders_.empty() || orders_.front().step != step) {
    return std::nullopt;
  }
  const Order order = orders_.front();
  orders_.pop_front();
  return order;
}

int64_t DevicePlacement::nextLookNs() const {
  const MutexLock lock(mutex_);
  return host_.nowNs() + std::max(kLeastLookNs, foresight_.until_gate_ns / 2);
}

void DevicePlacement::ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> begin,
                              std::optional<uint32_t> end) {
  const MutexLock lock(mutex_);
  if (begin && end && !failed_) {
    batches_.push_back({order.step, order.tier, order.wait, bytes, *begin, *end});
    return;
  }
  untimed_[static_cast<size_t>(order.tier)] += bytes;
  for (const auto& mark : {begin, end}) {
    if (mark) {
      marks_.giveBack(*mark);
    }
  }
}

void DevicePlacement::learn() {
  {
    const MutexLock lock(mutex_);
    pollMarks();
    for (const DeviceLearner::Begun& begun : std::exchange(begun_, {})) {
      learner_.add(begun);
    }
    for (const DeviceLearner::Batch& batch : std::exchange(batches_, {})) {
      learner_.add(batch);
    }
    // A mark that copies will still be ordered behind stays.
    if (std::none_of(orders_.begin(), orders_.end(),
                     [](const Order& order) { return order.behind.has_value(); })) {
      for (const OpEvent& mark : std::exchange(polled_, {})) {
        learner_.add(mark);
      }
    }
  }
  const int64_t step = learner_.step();
  const bool fine = learner_.learn();
  if (fine && learner_.step() == step) {
    return;
  }
  Foresight foresight{
      .plan = learner_.foresee(), .bytes = learner_.bytes(), .step = learner_.step()};
  if (const Forecast* const forecast = learner_.placer().model().forecast();
      fine && forecast != nullptr) {
    foresight.until_gate_ns = forecast->until_gate_ns;
    foresight.began_ns = learner_.stepBeganNs();
  }
  const MutexLock lock(mutex_);
  foresight_ = std::move(foresight);
  if (!fine && !std::exchange(failed_, true)) {
    marks_.forget();
    orders_.clear();
    unordered_ = 0;
    now_.reset();
    begun_.clear();
    for (const OpEvent& mark : std::exchange(polled_, {})) {
      marks_.giveBack(mark.mark);
    }
    for (const DeviceLearner::Batch& batch : std::exchange(batches_, {})) {
      untimed_[static_cast<size_t>(batch.tier)] += batch.bytes;
      marks_.giveBack(batch.begin);
      marks_.giveBack(batch.end);
    }
  }
}

std::array<uint64_t, kTiers> DevicePlacement::takeUntimed() {
  auto untimed = learner_.takeUntimed();
  const MutexLock lock(mutex_);
  for (size_t tier = 0; tier < kTiers; ++tier) {
    untimed[tier] += std::exchange(untimed_[tier], 0);
  }
  return untimed;
}

}  // namespace reft
