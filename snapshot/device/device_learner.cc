#include "snapshot/device/device_learner.h"

#include <algorithm>
#include <utility>

namespace reft {

namespace {

constexpr size_t kMostLearnt = 1024;  // that nobody takes

bool trainingWaits(Tier tier) {
  return tier == Tier::kAtOnce || tier == Tier::kGate;
}

}  // namespace

DeviceLearner::~DeviceLearner() {
  giveBackAll();
  clock_.giveBackBase();
}

// Takes the times of copies of steps before `step`; of this step, only of those that were ordered
// behind one of its first `waits` waits or behind none. False: one has not landed.
bool DeviceLearner::settle(int64_t step, size_t waits) {
  while (!batches_.empty()) {
    const Batch& batch = batches_.front();
    if (batch.step >= step ||
        (now_ && batch.step == now_->step && batch.tier == Tier::kGap && batch.wait >= waits)) {
      return true;
    }
    const auto end_ns = clock_.timeOf(batch.end);
    const auto begin_ns = end_ns ? clock_.timeOf(batch.begin) : std::nullopt;
    if (!begin_ns) {
      return false;
    }
    if (now_ && batch.step == now_->step) {
      record_.copies.push_back({*begin_ns, *end_ns, batch.bytes, batch.tier});
      if (!trainingWaits(batch.tier)) {
        placer_.copied(batch.bytes, batch.tier, *begin_ns, *end_ns);
      }
      marks_.giveBack(batch.begin);
      marks_.giveBack(batch.end);
    } else {
      drop(batch);  // its step was lost
    }
    batches_.pop_front();
  }
  return true;
}

void DeviceLearner::drop(const Batch& batch) {
  untimed_[static_cast<size_t>(batch.tier)] += batch.bytes;
  marks_.giveBack(batch.begin);
  marks_.giveBack(batch.end);
}

void DeviceLearner::endStep(const Begun& next, int64_t at_ns) {
  const bool gated = gate_begun_ && gate_ended_;
  const bool follows = now_ && next.step == now_->step + 1;
  placer_.beginStep(at_ns, 0, 0,
                    /*learn=*/follows && gated && next.lost == now_->lost && now_->bytes > 0);
  if (!now_) {
    return;
  }
  record_.step = now_->step;
  record_.block = now_->block;
  record_.beside_copy = now_->beside_copy;
  record_.point_begin_ns = now_->point_begin_ns;
  record_.point_end_ns = now_->point_end_ns;
  record_.whole = follows && gated;
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
  if (steps_.size() < kMostLearnt) {
    steps_.push_back(std::move(record_));
  }
}

// False: not yet.
bool DeviceLearner::learnPoint(const OpEvent& mark, int64_t at_ns) {
  const auto step = static_cast<int64_t>(mark.ticket);
  if (!settle(step, ~size_t{0})) {
    return false;
  }
  while (!begun_.empty() && begun_.front().step < step) {
    begun_.pop_front();  // its program point was lost
  }
  if (begun_.empty()) {
    return false;  // the host is still at it
  }
  if (begun_.front().step != step) {
    marks_.giveBack(mark.mark);  // nothing is known of it
    return true;
  }
  const Begun next = begun_.front();
  begun_.pop_front();
  endStep(next, at_ns);
  now_ = next;
  if (next.bytes > 0) {
    bytes_ = next.bytes;
    placer_.take(PlacementPolicy::kGap, next.chunk_bytes, next.bytes, 0);
  }
  record_ = {};
  record_.begin_ns = record_.gate_begin_ns = record_.gate_end_ns = at_ns;
  gate_begun_ = gate_ended_ = false;
  depth_ = waits_ = 0;
  clock_.rebase(mark.mark, at_ns);
  return true;
}

bool DeviceLearner::learnMark() {
  if (pending_.empty()) {
    return false;
  }
  const OpEvent mark = pending_.front();
  if (mark.what == OpEvent::kBegin && !begun_.empty()) {
    clock_.use(begun_.front().device);
  }
  const auto at_ns = clock_.timeOf(mark.mark);
  if (!at_ns) {
    return false;
  }
  switch (mark.what) {
    case OpEvent::kBegin: {
      if (!learnPoint(mark, *at_ns)) {
        return false;
      }
      pending_.pop_front();
      return true;
    }
    case OpEvent::kWaitBegin: {
      const ScheduleOp op =
          scheduleOp(mark.kind, mark.group, mark.peer, mark.tag, mark.bytes, mark.signature);
      if (depth_++ == 0) {
        wait_ = {*at_ns, *at_ns, mark.kind, mark.bytes, !op.fills_link};
      }
      placer_.waitBegin(op, *at_ns);
      break;
    }
    case OpEvent::kWaitEnd: {
      if (!wait_ended_ && depth_ > 0) {
        placer_.waitEnd(*at_ns);
        if (--depth_ == 0) {
          wait_.end_ns = *at_ns;
          record_.waits.push_back(wait_);
          ++waits_;
        }
      }
      // Copies that ran past the end of a gap tell the Placer so, before the next one begins.
      wait_ended_ = now_ && !settle(now_->step + 1, waits_);
      if (wait_ended_) {
        return false;
      }
      break;
    }
    case OpEvent::kGate:
      record_.gate_begin_ns = record_.gate_end_ns = *at_ns;
      gate_begun_ = true;
      break;
    case OpEvent::kDone:
      if (gate_begun_) {
        record_.gate_end_ns = *at_ns;
        gate_ended_ = true;
        placer_.gateDone(record_.gate_begin_ns, *at_ns);
      }
      break;
    case OpEvent::kSnapshot: break;  // of the host's ring only
  }
  marks_.giveBack(mark.mark);
  pending_.pop_front();
  return true;
}

bool DeviceLearner::learn() {
  while (!clock_.failed() && learnMark()) {
  }
  if (!clock_.failed() && now_) {
    settle(now_->step + 1, waits_);  // marks are few, and copies many
  }
  if (clock_.failed()) {
    giveBackAll();
  }
  return !clock_.failed();
}

std::vector<DeviceStep> DeviceLearner::takeSteps() {
  return std::exchange(steps_, {});
}

std::array<uint64_t, kTiers> DeviceLearner::takeUntimed() {
  return std::exchange(untimed_, {});
}

void DeviceLearner::giveBackAll() {
  for (const OpEvent& mark : pending_) {
    marks_.giveBack(mark.mark);
  }
  for (const Batch& batch : batches_) {
    drop(batch);
  }
  for (const DeviceCopies& one : record_.copies) {
    untimed_[static_cast<size_t>(one.tier)] += one.bytes;
  }
  record_ = {};
  pending_.clear();
  batches_.clear();
  begun_.clear();
  now_.reset();
}

}  // namespace reft
