#include "snapshot/device_placement.h"

#include <algorithm>
#include <utility>

namespace reft {

namespace {

constexpr size_t kMostSteps = 1024;  // that nobody takes
constexpr double kLate = 1.1;        // times what the step was foretold to take to its gate
constexpr int64_t kLeastLookNs = 100'000'000;

bool trainingWaits(Tier tier) {
  return tier == Tier::kAtOnce || tier == Tier::kGate;
}

}  // namespace

DevicePlacement::DevicePlacement(DeviceCopy& copy, DeviceMarks& marks, const Clock& host)
    : copy_(copy), marks_(marks), host_(host), clock_(copy, marks, host), placer_(PlacerOptions{}) {
  OpEvent mark;
  while (marks_.poll(mark)) {  // of an engine before this one
    marks_.giveBack(mark.mark);
  }
}

DevicePlacement::~DevicePlacement() {
  hear();
  reset();
  clock_.giveBackBase();
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

bool DevicePlacement::point(const DeviceStream& stream, int64_t step) {
  const std::lock_guard lock(mutex_);
  if (clock_.failed() || !copy_.follow(marks_, stream)) {
    return false;
  }
  clock_.use(stream.device);
  stream_ = stream;
  hear();
  orders_.clear();  // of a step that went another way
  plan_ = {};
  unordered_ = 0;
  marks_.ignore();
  in_step_ = gated_ = false;
  if (!begun_.empty()) {
    begun_.back().told = true;
  }
  if (begun_.size() == DeviceMarks::kEvents) {
    begun_.pop_front();  // the device is far behind, or no mark can be made
  }
  begun_.push_back({.step = step, .lost = marks_.lost()});
  copy_.mark(marks_, {.what = OpEvent::kBegin, .kind = OpKind::kStep, .ticket = static_cast<uint64_t>(step)}, stream_);
  return true;
}

void DevicePlacement::begin(std::optional<PlacementPolicy> policy, uint64_t chunk_bytes, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (clock_.failed() || begun_.empty()) {
    return;
  }
  Begun& now = begun_.back();
  now.chunk_bytes = chunk_bytes;
  now.bytes = bytes;
  marks_.watch();
  uint64_t in_gaps = 0;
  if (policy == PlacementPolicy::kGap) {
    plan_ = placer_.foresee(bytes, /*past_the_guard=*/true);
    for (const uint64_t gap : plan_.gap_bytes) {
      in_gaps += gap;
    }
  }
  unordered_ = in_gaps;
  if (policy && in_gaps < bytes) {
    const Tier tier = policy == PlacementPolicy::kSync ? Tier::kAtOnce : Tier::kCompute;
    orders_.push_back({bytes - in_gaps, tier, std::nullopt, 0, now.step});
  }
}

void DevicePlacement::pointDone(uint64_t block, bool beside_copy, int64_t begin_ns, int64_t end_ns) {
  const std::lock_guard lock(mutex_);
  if (begun_.empty() || begun_.back().told) {
    return;
  }
  Begun& now = begun_.back();
  now.told = true;
  now.block = block;
  now.beside_copy = beside_copy;
  now.point_begin_ns = begin_ns;
  now.point_end_ns = end_ns;
}

void DevicePlacement::gateBegin(const DeviceStream& stream) {
  const std::lock_guard lock(mutex_);
  if (!clock_.failed() && !begun_.empty() && !gated_) {
    copy_.mark(marks_, {.what = OpEvent::kGate}, stream);
  }
}

void DevicePlacement::gateEnd(const DeviceStream& stream) {
  const std::lock_guard lock(mutex_);
  if (clock_.failed() || begun_.empty() || gated_) {
    return;
  }
  copy_.mark(marks_, {.what = OpEvent::kDone}, stream);
  gated_ = true;
  begun_.back().told = true;
  marks_.ignore();
  hear();
  orders_.clear();  // what was not asked for by now, the gate has asked for
}

// Under the mutex.
void DevicePlacement::hear() {
  OpEvent mark;
  while (marks_.poll(mark)) {
    told_.push_back(mark);
    if (mark.what == OpEvent::kBegin) {
      in_step_ = !begun_.empty() && static_cast<int64_t>(mark.ticket) == begun_.back().step;
      waits_begun_ = 0;
    } else if (mark.what == OpEvent::kWaitBegin && in_step_) {
      const size_t wait = waits_begun_++;
      if (wait < plan_.gap_bytes.size() && plan_.gap_bytes[wait] > 0) {
        orders_.push_back({plan_.gap_bytes[wait], Tier::kGap, mark.mark, wait, begun_.back().step});
        unordered_ -= plan_.gap_bytes[wait];
      }
    }
  }
}

std::optional<DevicePlacement::Order> DevicePlacement::next(int64_t step) {
  const std::lock_guard lock(mutex_);
  hear();
  const bool there = !gated_ && now_ && now_->step == step && !begun_.empty() && begun_.back().step == step;
  if (there && unordered_ > 0 && placer_.model().forecast() != nullptr) {
    const double until_gate_ns = static_cast<double>(placer_.model().forecast()->until_gate_ns);
    if (host_.nowNs() > clock_.hostNs(record_.begin_ns) + static_cast<int64_t>(kLate * until_gate_ns)) {
      orders_.push_back({std::exchange(unordered_, 0), Tier::kCompute, std::nullopt, 0, step});
      plan_ = {};
    }
  }
  if (orders_.empty() || orders_.front().step != step) {
    return std::nullopt;
  }
  const Order order = orders_.front();
  orders_.pop_front();
  return order;
}

int64_t DevicePlacement::nextLookNs() const {
  const std::lock_guard lock(mutex_);
  const Forecast* const forecast = placer_.model().forecast();
  return host_.nowNs() + std::max(kLeastLookNs, forecast == nullptr ? 0 : forecast->until_gate_ns / 2);
}

void DevicePlacement::ordered(const Order& order, uint64_t bytes, std::optional<uint32_t> begin,
                              std::optional<uint32_t> end) {
  const std::lock_guard lock(mutex_);
  if (begin && end && !clock_.failed()) {
    batches_.push_back({order, *begin, *end});
    batches_.back().order.bytes = bytes;
    return;
  }
  untimed_[static_cast<size_t>(order.tier)] += bytes;
  for (const auto& mark : {begin, end}) {
    if (mark) {
      marks_.giveBack(*mark);
    }
  }
}

// -- behind the device --------------------------------------------------------------------------------------------------

// Under the mutex. Takes the times of the copies of a step that were ordered for its waits up to `wait`, or for none. False: one has
// not landed.
bool DevicePlacement::settleBatches(int64_t step, size_t wait) {
  while (!batches_.empty()) {
    const Batch& batch = batches_.front();
    const Order& order = batch.order;
    if (order.step > step || (order.step == step && order.tier == Tier::kGap && order.wait > wait)) {
      return true;
    }
    const auto end_ns = clock_.timeOf(batch.end);
    const auto begin_ns = end_ns ? clock_.timeOf(batch.begin) : std::nullopt;
    if (!begin_ns) {
      return false;
    }
    if (order.step == step) {
      record_.copies.push_back({*begin_ns, *end_ns, order.bytes, order.tier});
      if (!trainingWaits(order.tier)) {
        placer_.copied(order.bytes, order.tier, *begin_ns, *end_ns);
      }
      marks_.giveBack(batch.begin);
      marks_.giveBack(batch.end);
    } else {
      drop(batch);
    }
    batches_.pop_front();
  }
  return true;
}

void DevicePlacement::drop(const Batch& batch) {
  untimed_[static_cast<size_t>(batch.order.tier)] += batch.order.bytes;
  marks_.giveBack(batch.begin);
  marks_.giveBack(batch.end);
}

void DevicePlacement::endStep(const Begun& next, int64_t at_ns) {
  const bool whole = now_ && next.lost == now_->lost && next.step == now_->step + 1;
  placer_.beginStep(at_ns, 0, 0, /*learn=*/whole);
  if (!now_) {
    return;
  }
  record_.step = now_->step;
  record_.block = now_->block;
  record_.beside_copy = now_->beside_copy;
  record_.point_begin_ns = now_->point_begin_ns;
  record_.point_end_ns = now_->point_end_ns;
  record_.whole = whole && gate_known_;
  record_.end_ns = at_ns;
  for (int64_t* const time :
       {&record_.begin_ns, &record_.end_ns, &record_.gate_begin_ns, &record_.gate_end_ns}) {
    *time = clock_.hostNs(*time);
  }
  for (DeviceWait& one : record_.waits) {
    one.begin_ns = clock_.hostNs(one.begin_ns);
    one.end_ns = clock_.hostNs(one.end_ns);
  }
  for (DeviceCopies& one : record_.copies) {
    one.begin_ns = clock_.hostNs(one.begin_ns);
    one.end_ns = clock_.hostNs(one.end_ns);
  }
  if (steps_.size() < kMostSteps) {
    steps_.push_back(std::move(record_));
  }
}

// False: not yet.
bool DevicePlacement::learnPoint(const OpEvent& mark, int64_t at_ns) {
  if (now_ && !settleBatches(now_->step, ~size_t{0})) {
    return false;
  }
  const auto step = static_cast<int64_t>(mark.ticket);
  while (!begun_.empty() && begun_.front().step < step) {
    begun_.pop_front();  // its program point was lost
  }
  if (begun_.empty() || begun_.front().step != step) {
    marks_.giveBack(mark.mark);  // nothing is known of it any more
    return true;
  }
  if (!begun_.front().told) {
    return false;
  }
  const Begun next = begun_.front();
  endStep(next, at_ns);
  if (begun_.size() > 1) {
    begun_.pop_front();  // the newest one is the host's
  }
  now_ = next;
  if (next.bytes > 0) {
    placer_.take(PlacementPolicy::kGap, next.chunk_bytes, next.bytes, 0);
  }
  record_ = {};
  record_.begin_ns = record_.gate_begin_ns = record_.gate_end_ns = at_ns;
  gate_known_ = false;
  waits_ended_ = 0;
  clock_.rebase(mark.mark, at_ns);
  return true;
}

bool DevicePlacement::learnOne() {
  if (told_.empty()) {
    return false;
  }
  const OpEvent mark = told_.front();
  const auto at_ns = clock_.timeOf(mark.mark);
  if (!at_ns) {
    return false;
  }
  switch (mark.what) {
    case OpEvent::kBegin: {
      if (!learnPoint(mark, *at_ns)) {
        return false;
      }
      told_.pop_front();
      return true;
    }
    case OpEvent::kWaitBegin: {
      const ScheduleOp op = scheduleOp(mark.kind, mark.group, mark.peer, mark.tag, mark.bytes, mark.signature);
      if (!placer_.model().waiting()) {
        wait_ = {*at_ns, *at_ns, mark.kind, mark.bytes, !op.fills_link};
      }
      placer_.waitBegin(op, *at_ns);
      break;
    }
    case OpEvent::kWaitEnd: {
      if (placer_.model().waiting()) {
        placer_.waitEnd(*at_ns);
        if (now_ && !placer_.model().waiting()) {
          wait_.end_ns = *at_ns;
          record_.waits.push_back(wait_);
        }
      }
      if (now_ && !settleBatches(now_->step, waits_ended_)) {
        return false;
      }
      ++waits_ended_;
      break;
    }
    case OpEvent::kSnapshot: break;  // of the host's ring only
    case OpEvent::kGate: record_.gate_begin_ns = record_.gate_end_ns = *at_ns; break;
    case OpEvent::kDone: {
      record_.gate_end_ns = *at_ns;
      gate_known_ = true;
      placer_.gateDone(record_.gate_begin_ns, *at_ns);
      break;
    }
  }
  marks_.giveBack(mark.mark);
  told_.pop_front();
  return true;
}

void DevicePlacement::learn() {
  const std::lock_guard lock(mutex_);
  hear();
  // A mark that copies are still to be ordered behind is not given back.
  const auto behind = [](const Order& order) { return order.behind.has_value(); };
  if (std::none_of(orders_.begin(), orders_.end(), behind)) {
    while (!clock_.failed() && learnOne()) {
    }
  }
  if (clock_.failed()) {
    reset();
  }
}

std::vector<DeviceStep> DevicePlacement::takeSteps() {
  const std::lock_guard lock(mutex_);
  return std::exchange(steps_, {});
}

std::array<uint64_t, kTiers> DevicePlacement::takeUntimed() {
  const std::lock_guard lock(mutex_);
  return std::exchange(untimed_, {});
}

// The device's times are not to be had any more. Under the mutex.
void DevicePlacement::reset() {
  marks_.forget();
  orders_.clear();
  for (const OpEvent& mark : told_) {
    marks_.giveBack(mark.mark);
  }
  for (const Batch& batch : batches_) {
    drop(batch);
  }
  for (const DeviceCopies& one : record_.copies) {
    untimed_[static_cast<size_t>(one.tier)] += one.bytes;
  }
  record_ = {};
  told_.clear();
  batches_.clear();
  begun_.clear();
  now_.reset();
}

}  // namespace reft
