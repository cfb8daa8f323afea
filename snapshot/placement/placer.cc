#include "snapshot/placement/placer.h"

#include <algorithm>
#include <cmath>

namespace reft {

namespace {

constexpr double kLeastGuard = 1.0;
constexpr double kMostGuard = 8.0;
constexpr double kGuardUp = 1.3;
constexpr double kGuardDown = 0.995;
constexpr double kRateGain = 0.2;
// A gap that lasts this many chunk times beyond its forecast, or without one, is expected to last
// for another chunk.
constexpr int64_t kSurpriseChunks = 2;
// A step that takes more than this percentage of its forecast time to the gate is of another kind:
// hold nothing back for its gaps.
constexpr double kLatePercent = 110;
// Fraction of the step's compute that stays free at its end when copies are spread over compute, so
// that a slightly shorter step does not stall at the gate.
constexpr double kReserve = 0.15;
// When the time to the gate is less than this many times the copy time of the remaining bytes, hold
// nothing back for gaps.
constexpr double kLastCall = 2.0;

// The share of `bytes` in proportion to `room` / `all`, rounded up to whole chunks.
uint64_t chunksFor(uint64_t bytes, uint64_t room, uint64_t all, uint64_t chunk_bytes) {
  const double part =
      all == 0 ? 0
               : static_cast<double>(bytes) * static_cast<double>(room) / static_cast<double>(all);
  constexpr double kRounding = 1e-6;  // in chunks: rounding may put an exact quotient too high
  return static_cast<uint64_t>(std::ceil(part / static_cast<double>(chunk_bytes) - kRounding)) *
         chunk_bytes;
}

uint64_t bytesIn(int64_t span_ns, double bytes_per_ns) {
  return span_ns <= 0 ? 0 : static_cast<uint64_t>(static_cast<double>(span_ns) * bytes_per_ns);
}

}  // namespace

const char* placementPolicyName(PlacementPolicy policy) {
  switch (policy) {
    case PlacementPolicy::kGap: return "gap";
    case PlacementPolicy::kEager: return "eager";
    case PlacementPolicy::kSync: return "sync";
    case PlacementPolicy::kPaper: return "paper";
  }
  return "unknown";
}

const char* tierName(Tier tier) {
  switch (tier) {
    case Tier::kAtOnce: return "at once";
    case Tier::kGap: return "gap";
    case Tier::kCompute: return "compute";
    case Tier::kCommunication: return "communication";
    case Tier::kGate: return "gate";
  }
  return "unknown";
}

Placer::Placer(PlacerOptions options) : options_(options), model_(options.model) {
  options_.chunk_bytes = std::max<uint64_t>(options_.chunk_bytes, 1);
  ns_per_byte_.fill(1e9 / std::max(options_.bytes_per_sec, 1.0));
}

int64_t Placer::chunkNs(Tier tier) const {
  return static_cast<int64_t>(
      static_cast<double>(std::min(options_.chunk_bytes, std::max<uint64_t>(left_, 1))) /
      rate(tier));
}

bool Placer::isGap() const {
  return model_.inBubble() || (model_.waiting() && !options_.shared_link);
}

// Bytes, in whole chunks, that fit into a forecast gap minus a guard of `guard_jitters` standard
// deviations. Copies are planned to end before the guard.
uint64_t Placer::roomIn(const ForecastSpan& span, double guard_jitters) const {
  if (!span.gap || (!span.bubble && options_.shared_link)) {
    return 0;
  }
  const auto guard = static_cast<int64_t>(guard_jitters * static_cast<double>(span.jitter_ns));
  return bytesIn(span.wait_ns - guard, rate(Tier::kGap)) / options_.chunk_bytes *
         options_.chunk_bytes;
}

void Placer::rebuild() {
  seen_changes_ = model_.forecastChanges();
  gap_room_from_.clear();
  compute_from_.clear();
  until_gate_ns_ = 0;
  paper_gap_ns_ = 0;
  const Forecast* forecast = model_.forecast();
  if (forecast == nullptr) {
    return;
  }
  until_gate_ns_ = forecast->until_gate_ns;
  const size_t count = forecast->spans.size();
  gap_room_from_.assign(count + 1, 0);
  compute_from_.assign(count + 1, 0);
  for (size_t i = count; i-- > 0;) {
    const ForecastSpan& span = forecast->spans[i];
    gap_room_from_[i] = gap_room_from_[i + 1] + roomIn(span, guard_);
    compute_from_[i] = compute_from_[i + 1] + span.compute_ns;
    if (span.bubble || !options_.shared_link) {
      paper_gap_ns_ += span.wait_ns;
    }
  }
}

// Distributes up to `bytes` over the gaps in proportion to their remaining room, and adds them to
// `gap_bytes`. Returns the number of bytes added.
uint64_t Placer::fillGaps(const Forecast& forecast, double guard_jitters, uint64_t bytes,
                          std::vector<uint64_t>& gap_bytes) const {
  const auto left_in = [&](size_t gap) {
    const uint64_t room = roomIn(forecast.spans[gap], guard_jitters);
    return room - std::min(room, gap_bytes[gap]);
  };
  uint64_t room = 0;
  for (size_t gap = 0; gap < gap_bytes.size(); ++gap) {
    room += left_in(gap);
  }
  const uint64_t in_gaps = std::min(bytes, room);
  uint64_t room_so_far = 0;
  uint64_t added = 0;
  for (size_t gap = 0; gap < gap_bytes.size(); ++gap) {
    const uint64_t left = left_in(gap);
    room_so_far += left;
    const uint64_t so_far =
        std::min(in_gaps, chunksFor(in_gaps, room_so_far, room, options_.chunk_bytes));
    const uint64_t here = std::min(so_far - std::min(added, so_far), left);
    gap_bytes[gap] += here;
    added += here;
  }
  return added;
}

PlacementPlan Placer::foresee(uint64_t bytes, bool past_the_guard) const {
  PlacementPlan plan;
  const Forecast* forecast = model_.forecast();
  plan.from_forecast = forecast != nullptr;
  const auto put = [&](Tier tier, uint64_t part) { plan.bytes[static_cast<size_t>(tier)] += part; };
  uint64_t rest = bytes;
  if (forecast == nullptr) {
    put(Tier::kCompute, rest);
    return plan;
  }
  int64_t communication_ns = 0;
  for (const ForecastSpan& span : forecast->spans) {
    communication_ns += span.communication_ns + (span.bubble ? 0 : span.wait_ns);
  }
  plan.gap_bytes.assign(forecast->spans.size(), 0);
  rest -= fillGaps(*forecast, guard_, rest, plan.gap_bytes);
  if (past_the_guard) {
    rest -= fillGaps(*forecast, 0, rest, plan.gap_bytes);
  }
  put(Tier::kGap, bytes - rest);
  const uint64_t compute = std::min(rest, bytesIn(compute_from_.front(), rate(Tier::kCompute)));
  put(Tier::kCompute, compute);
  rest -= compute;
  const uint64_t communication =
      std::min(rest, bytesIn(communication_ns, rate(Tier::kCommunication)));
  put(Tier::kCommunication, communication);
  put(Tier::kGate, rest - communication);
  return plan;
}

void Placer::makePlan() {
  const uint64_t rest = left_;
  if (snapshot_ && options_.policy == PlacementPolicy::kGap) {
    plan_ = foresee(rest, /*past_the_guard=*/false);
    return;
  }
  plan_ = {};
  plan_.from_forecast = model_.forecast() != nullptr;
  if (!snapshot_) {
    return;
  }
  const auto put = [&](Tier tier, uint64_t bytes) {
    plan_.bytes[static_cast<size_t>(tier)] += bytes;
  };
  if (options_.policy == PlacementPolicy::kPaper) {
    // The paper's T_bubble: W[:N * T_bubble / T_snapshot] goes into bubbles, the rest into compute
    // time.
    const double stages = options_.stages;
    const double bubble_ns = (0.8 * stages + 2 * stages - options_.stage - 2) *
                             static_cast<double>(options_.micro_batch_ns);
    const double share =
        bubble_ns * rate(Tier::kGap) / std::max<double>(static_cast<double>(rest), 1);
    paper_gap_left_ =
        paper_gap_ns_ > 0
            ? static_cast<uint64_t>(static_cast<double>(rest) * std::clamp(share, 0.0, 1.0))
            : 0;
    put(Tier::kGap, paper_gap_left_);
    put(Tier::kCompute, rest - paper_gap_left_);
    return;
  }
  put(Tier::kCompute, rest);
}

void Placer::beginStep(int64_t now_ns, uint64_t bytes, uint64_t at_once_bytes, bool learn) {
  model_.beginStep(now_ns, learn);
  step_begin_ns_ = now_ns;
  snapshot_ = bytes > 0;
  if (snapshot_) {
    granted_[static_cast<size_t>(Tier::kAtOnce)] += std::min(bytes, at_once_bytes);
  }
  left_ = snapshot_ ? bytes - std::min(bytes, at_once_bytes) : 0;
  span_begin_ns_ = next_compute_copy_ns_ = now_ns;
  gap_open_ = false;
  gap_budget_ = 0;
  paper_gap_left_ = 0;
  last_gap_end_ns_ = -1;
  rebuild();  // the guard and the rates may have changed, too
  makePlan();
  if (snapshot_) {
    plan_.bytes[static_cast<size_t>(Tier::kAtOnce)] = bytes - left_;
  }
}

void Placer::take(PlacementPolicy policy, uint64_t chunk_bytes, uint64_t bytes,
                  uint64_t at_once_bytes) {
  options_.policy = policy;
  options_.chunk_bytes = std::max<uint64_t>(chunk_bytes, 1);
  snapshot_ = true;
  at_once_bytes = std::min(bytes, at_once_bytes);
  granted_[static_cast<size_t>(Tier::kAtOnce)] += at_once_bytes;
  left_ = bytes - at_once_bytes;
  rebuild();
  makePlan();
  plan_.bytes[static_cast<size_t>(Tier::kAtOnce)] = at_once_bytes;
}

void Placer::opBegin(const ScheduleOp& op, int64_t now_ns) {
  model_.opBegin(op, now_ns);
}

void Placer::opDone(const ScheduleOp& op, int64_t now_ns) {
  model_.opDone(op, now_ns);
}

void Placer::waitBegin(const ScheduleOp& op, int64_t now_ns) {
  const bool outermost = !model_.waiting();
  const ForecastSpan* foretold = model_.waitBegin(op, now_ns);
  if (model_.forecastChanges() != seen_changes_) {
    rebuild();
  }
  if (outermost && isGap()) {
    openGap(foretold, now_ns);
  }
}

// Share of the remaining bytes for a gap that begins: as many as fit if the gaps cannot take all of
// them, else a part in proportion to the room.
uint64_t Placer::shareOf(const ForecastSpan& gap) const {
  const size_t next = model_.waitsBegun();
  if (next >= gap_room_from_.size()) {
    return std::numeric_limits<uint64_t>::max();
  }
  const uint64_t here = roomIn(gap, guard_);
  const uint64_t room = here + gap_room_from_[next];
  return left_ > room ? std::numeric_limits<uint64_t>::max()
                      : chunksFor(left_, here, room, options_.chunk_bytes);
}

void Placer::openGap(const ForecastSpan* foretold, int64_t now_ns) {
  gap_open_ = true;
  overran_ = false;
  gap_begin_ns_ = now_ns;
  const int64_t surprise = kSurpriseChunks * chunkNs(Tier::kGap);
  gap_share_ = foretold == nullptr ? std::numeric_limits<uint64_t>::max() : shareOf(*foretold);
  if (foretold == nullptr) {
    gap_until_ns_ = now_ns;
    gap_surprise_ns_ = now_ns + std::max(surprise, options_.model.min_gap_ns);
    return;
  }
  const auto guard = static_cast<int64_t>(guard_ * static_cast<double>(foretold->jitter_ns));
  gap_until_ns_ = now_ns + std::max<int64_t>(0, foretold->wait_ns - guard);
  // Past its length plus the guard, this is not the gap that was learned.
  gap_surprise_ns_ = now_ns + foretold->wait_ns + std::max(guard, surprise);
  if (options_.policy == PlacementPolicy::kPaper && paper_gap_ns_ > 0) {
    gap_budget_ += static_cast<uint64_t>(
        static_cast<double>(plan_.bytes[static_cast<size_t>(Tier::kGap)]) *
        static_cast<double>(foretold->wait_ns) / static_cast<double>(paper_gap_ns_));
  }
}

void Placer::waitEnd(int64_t now_ns) {
  const bool was_waiting = model_.waiting();
  model_.waitEnd(now_ns);
  if (!was_waiting || model_.waiting()) {
    return;
  }
  span_begin_ns_ = now_ns;
  if (gap_open_) {
    gap_open_ = false;
    last_gap_end_ns_ = now_ns;
  }
}

void Placer::copied(uint64_t bytes, Tier tier, int64_t begin_ns, int64_t end_ns) {
  bytes = std::min(bytes, left_);
  left_ -= bytes;
  granted_[static_cast<size_t>(tier)] += bytes;
  gap_budget_ -= std::min(gap_budget_, bytes);
  gap_share_ -= std::min(gap_share_, bytes);
  const auto expected_ns = static_cast<int64_t>(static_cast<double>(bytes) / rate(tier));
  learnRate(tier, bytes, end_ns - begin_ns);
  if (tier != Tier::kGap) {
    return;
  }
  const bool past_the_end = !gap_open_ && last_gap_end_ns_ >= begin_ns && end_ns > last_gap_end_ns_;
  if (past_the_end) {
    longest_overrun_ns_ = std::max(longest_overrun_ns_, end_ns - last_gap_end_ns_);
    // Widen the guard only if the gap was shorter than forecast by more than the guard. A copy that
    // was slower than expected is no evidence for that.
    const bool gap_was_short =
        last_gap_end_ns_ < gap_until_ns_ && begin_ns + expected_ns > last_gap_end_ns_;
    if (gap_was_short && !overran_) {
      overran_ = true;
      guard_ = std::min(kMostGuard, guard_ * kGuardUp);
    }
  } else {
    guard_ = std::max(kLeastGuard, guard_ * kGuardDown);
  }
}

void Placer::learnRate(Tier tier, uint64_t bytes, int64_t span_ns) {
  if (span_ns <= 0 || bytes == 0) {
    return;
  }
  // Clamp times to plausible rates, so that one bad measurement does not stop copying.
  const double measured =
      std::clamp(static_cast<double>(span_ns) / static_cast<double>(bytes), 1e-4, 1e4);
  if (!any_measured_) {
    ns_per_byte_.fill(measured);  // also for the other tiers: better than the default
    any_measured_ = true;
  }
  double& known = ns_per_byte_[static_cast<size_t>(tier)];
  bool& was_measured = measured_[static_cast<size_t>(tier)];
  known += (was_measured ? kRateGain : 1.0) * (measured - known);
  was_measured = true;
}

Grant Placer::ask(int64_t now_ns) {
  Grant grant;
  if (left_ == 0) {
    return grant;
  }
  const uint64_t chunk = std::min(options_.chunk_bytes, left_);
  const bool in_gap = gap_open_;
  const Tier tier = this->tier();
  const auto give = [&](uint64_t bytes, int64_t until_ns) {
    grant.bytes = std::min(bytes, left_);
    grant.until_ns = until_ns;
    grant.tier = tier;
    return grant;
  };
  const auto later = [&](int64_t at_ns) {
    grant.retry_ns = std::max(at_ns, now_ns + 1);
    return grant;
  };
  if (options_.policy == PlacementPolicy::kEager || options_.policy == PlacementPolicy::kSync) {
    return give(chunk, Grant::kNever);
  }
  if (options_.policy == PlacementPolicy::kPaper) {
    // Bytes assigned to a bubble are launched in it and run on after its end; nothing stops them.
    const uint64_t in_bubbles = plan_.bytes[static_cast<size_t>(Tier::kGap)];
    if (gap_budget_ > 0) {
      return give(std::min(chunk, gap_budget_), Grant::kNever);
    }
    if (!in_gap && left_ > in_bubbles) {
      return give(chunk, Grant::kNever);
    }
    const bool no_gap_left =
        model_.forecast() == nullptr || now_ns - step_begin_ns_ > until_gate_ns_;
    return no_gap_left ? give(chunk, Grant::kNever) : grant;
  }

  // kGap from here on. First, how much the remaining gaps can take.
  const size_t next_gap = model_.waitsBegun();
  const int64_t late_ns =
      step_begin_ns_ +
      static_cast<int64_t>(static_cast<double>(until_gate_ns_) * (kLatePercent / 100)) + 1;
  const bool known =
      !gap_room_from_.empty() && next_gap < gap_room_from_.size() && now_ns < late_ns;
  const auto all_ns = static_cast<int64_t>(static_cast<double>(left_) / rate(Tier::kCompute));
  const int64_t to_gate_ns = until_gate_ns_ - (now_ns - step_begin_ns_);
  if (known && static_cast<double>(to_gate_ns) < kLastCall * static_cast<double>(all_ns)) {
    return give(chunk, now_ns + chunkNs(tier));
  }
  const uint64_t to_come = known ? gap_room_from_[next_gap] : 0;
  if (in_gap) {
    const int64_t chunk_ns = chunkNs(Tier::kGap);
    if (gap_share_ == 0 && left_ <= to_come && now_ns < gap_surprise_ns_) {
      return later(gap_surprise_ns_);
    }
    if (now_ns + chunk_ns <= gap_until_ns_) {
      const uint64_t fits =
          std::min(bytesIn(gap_until_ns_ - now_ns, rate(Tier::kGap)), gap_share_) /
          options_.chunk_bytes;
      return give(std::max<uint64_t>(fits, 1) * options_.chunk_bytes, gap_until_ns_);
    }
    // Keep the guard only while the bytes that it holds back have a better place.
    if (now_ns >= gap_surprise_ns_ || left_ > to_come) {
      if (now_ns >= gap_surprise_ns_ || gap_until_ns_ > gap_begin_ns_) {
        return give(chunk, now_ns + chunk_ns);
      }
    }
    return later(gap_surprise_ns_);
  }
  if (left_ <= to_come) {
    return known ? later(late_ns) : grant;
  }
  // A step without gaps or without a forecast: copy now.
  if (tier == Tier::kCompute && (!known || gap_room_from_.front() == 0)) {
    return give(chunk, now_ns + chunkNs(Tier::kCompute));
  }
  // Remaining compute from this span on, less its elapsed part and the reserve.
  int64_t compute_ns = 0;
  if (known) {
    const Forecast& forecast = *model_.forecast();
    const int64_t here = next_gap < forecast.spans.size() ? forecast.spans[next_gap].compute_ns : 0;
    const int64_t passed = std::min(here, std::max<int64_t>(0, now_ns - span_begin_ns_));
    compute_ns = compute_from_[std::min(next_gap, compute_from_.size() - 1)] - passed -
                 static_cast<int64_t>(kReserve * static_cast<double>(compute_from_.front()));
  }
  const auto needed_ns =
      static_cast<int64_t>(static_cast<double>(left_ - to_come) / rate(Tier::kCompute));
  if (tier == Tier::kCommunication) {
    return needed_ns > compute_ns ? give(chunk, Grant::kNever) : later(late_ns);
  }
  // Spread the copies evenly over the remaining compute. Gaps may turn out to hold more than
  // forecast, and bytes already copied during compute cannot use that room.
  if (now_ns < next_compute_copy_ns_) {
    return later(next_compute_copy_ns_);
  }
  const double spacing =
      needed_ns <= 0
          ? 1.0
          : std::max(1.0, static_cast<double>(compute_ns) / static_cast<double>(needed_ns));
  const auto chunk_ns = static_cast<double>(chunkNs(Tier::kCompute));
  // Without spare compute there is no pause, however fast the copy was.
  next_compute_copy_ns_ =
      spacing > 1.0 ? now_ns + static_cast<int64_t>(spacing * chunk_ns) : now_ns;
  return give(chunk, now_ns + static_cast<int64_t>(spacing * chunk_ns));
}

uint64_t Placer::gate(int64_t now_ns) {
  // This time counts as part of the schedule until gateDone() reports how much of it was a stall
  // for copies.
  (void)now_ns;
  return left_;
}

void Placer::gateDone(int64_t begin_ns, int64_t now_ns) {
  if (left_ > 0) {
    granted_[static_cast<size_t>(Tier::kGate)] += left_;
    left_ = 0;
  }
  model_.gate(now_ns, now_ns > begin_ns ? now_ns - begin_ns : 0);
}

}  // namespace reft
