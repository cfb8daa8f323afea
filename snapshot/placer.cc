#include "snapshot/placer.h"

#include <algorithm>
#include <cmath>

namespace reft {

namespace {

constexpr double kLeastGuard = 1.0;
constexpr double kMostGuard = 8.0;
constexpr double kGuardUp = 1.3;
constexpr double kGuardDown = 0.995;
constexpr double kRateGain = 0.2;
// A gap that nobody foretold and that has lasted so many chunks is expected to last another one.
constexpr int64_t kSurpriseChunks = 2;
// A step that is so much longer than foretold is another one: nothing is kept back for its gaps.
constexpr double kLatePercent = 110;
constexpr size_t kPeriods = 16;
constexpr size_t kFewestControls = 3;
constexpr size_t kFewestSnapshots = 4;

uint64_t bytesIn(int64_t span_ns, double bytes_per_ns) {
  return span_ns <= 0 ? 0 : static_cast<uint64_t>(static_cast<double>(span_ns) * bytes_per_ns);
}

int64_t medianOf(std::vector<int64_t> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void keepNewest(std::vector<int64_t>& values, int64_t value) {
  if (values.size() == kPeriods) {
    values.erase(values.begin());
  }
  values.push_back(value);
}

// Standard error of a median, robustly.
double errorOfMedian(const std::vector<int64_t>& values, int64_t median) {
  std::vector<int64_t> off;
  off.reserve(values.size());
  for (const int64_t value : values) {
    off.push_back(std::abs(value - median));
  }
  return 1.48 * 1.25 * static_cast<double>(medianOf(off)) / std::sqrt(static_cast<double>(values.size()));
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
  options_.max_every = std::max(options_.max_every, 1u);
  options_.control_every = std::max(options_.control_every, 2u);
  bytes_per_ns_.fill(std::max(options_.bytes_per_sec, 1.0) / 1e9);
}

int64_t Placer::chunkNs(Tier tier) const {
  return static_cast<int64_t>(static_cast<double>(std::min(options_.chunk_bytes, std::max<uint64_t>(left_, 1))) /
                              rate(tier));
}

bool Placer::isGap() const {
  return model_.inBubble() || (model_.waiting() && !options_.shared_link);
}

// Whole chunks that fit into a foretold gap. Never more than the gap less its guard: copies are planned to end before it.
uint64_t Placer::roomIn(const ForecastSpan& span) const {
  if (!span.gap || (!span.bubble && options_.shared_link)) {
    return 0;
  }
  const auto guard = static_cast<int64_t>(guard_ * static_cast<double>(span.jitter_ns));
  return bytesIn(span.wait_ns - guard, rate(Tier::kGap)) / options_.chunk_bytes * options_.chunk_bytes;
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
    gap_room_from_[i] = gap_room_from_[i + 1] + roomIn(span);
    compute_from_[i] = compute_from_[i + 1] + span.compute_ns;
    if (span.bubble || !options_.shared_link) {
      paper_gap_ns_ += span.wait_ns;
    }
  }
}

void Placer::makePlan() {
  plan_.bytes.fill(0);
  plan_.gap_bytes.clear();
  const Forecast* forecast = model_.forecast();
  plan_.from_forecast = forecast != nullptr;
  if (!snapshot_) {
    return;
  }
  const auto put = [&](Tier tier, uint64_t bytes) { plan_.bytes[static_cast<size_t>(tier)] += bytes; };
  uint64_t rest = left_;
  if (options_.policy == PlacementPolicy::kPaper) {
    // T_bubble of the paper; W[:N * T_bubble / T_snapshot] is launched in bubbles, the rest in computation time.
    const double stages = options_.stages;
    const double bubble_ns =
        (0.8 * stages + 2 * stages - options_.stage - 2) * static_cast<double>(options_.micro_batch_ns);
    const double share = bubble_ns * rate(Tier::kGap) / std::max<double>(static_cast<double>(rest), 1);
    paper_gap_left_ =
        paper_gap_ns_ > 0 ? static_cast<uint64_t>(static_cast<double>(rest) * std::clamp(share, 0.0, 1.0)) : 0;
    put(Tier::kGap, paper_gap_left_);
    put(Tier::kCompute, rest - paper_gap_left_);
    return;
  }
  if (options_.policy != PlacementPolicy::kGap || forecast == nullptr) {
    put(Tier::kCompute, rest);
    return;
  }
  int64_t communication_ns = 0;
  for (const ForecastSpan& span : forecast->spans) {
    const uint64_t here = std::min(rest, roomIn(span));
    plan_.gap_bytes.push_back(here);
    put(Tier::kGap, here);
    rest -= here;
    communication_ns += span.communication_ns + (span.bubble ? 0 : span.wait_ns);
  }
  const uint64_t compute = std::min(rest, bytesIn(compute_from_.front(), rate(Tier::kCompute)));
  put(Tier::kCompute, compute);
  rest -= compute;
  const uint64_t communication = std::min(rest, bytesIn(communication_ns, rate(Tier::kCommunication)));
  put(Tier::kCommunication, communication);
  put(Tier::kGate, rest - communication);
}

bool Placer::wantsSnapshot() {
  if (options_.overhead_limit <= 0) {
    return true;
  }
  if (every_ > 1) {
    since_control_ = 0;
    return ++since_snapshot_ >= every_;
  }
  // Every step: a few are left out, closer together until the first comparison is possible.
  const uint32_t control_every = without_.size() < kFewestControls ? 8 : options_.control_every;
  if (++since_control_ >= control_every) {
    since_control_ = 0;
    return false;
  }
  return true;
}

// The step that has ended belongs to one of two samples; when both are large enough, the cadence follows their difference.
void Placer::learnOverhead(int64_t now_ns) {
  const ScheduleModel::Errors errors = model_.errors();
  const bool usual = errors.last_class == StepClass::kKnown || errors.last_class == StepClass::kSlow;
  if (options_.overhead_limit <= 0 || step_begin_ns_ < 0 || now_ns <= step_begin_ns_) {
    return;
  }
  if (!usual) {
    if (errors.last_class != StepClass::kShort && errors.last_class != StepClass::kExtended) {
      with_.clear();  // another schedule: nothing to compare with
      without_.clear();
    }
    return;
  }
  keepNewest(with_snapshot_ ? with_ : without_, now_ns - step_begin_ns_);
  if (with_.size() < kFewestSnapshots || without_.size() < kFewestControls) {
    return;
  }
  const int64_t with = medianOf(with_);
  const int64_t without = std::max<int64_t>(medianOf(without_), 1);
  const double noise =
      std::hypot(errorOfMedian(with_, with), errorOfMedian(without_, without)) / static_cast<double>(without);
  overhead_ = static_cast<double>(with - without) / static_cast<double>(without);
  const double now_costs = overhead_ / every_;
  const uint32_t before = every_;
  if (now_costs > options_.overhead_limit && overhead_ > 2 * noise) {
    const double wanted = std::ceil(overhead_ / options_.overhead_limit);
    every_ = static_cast<uint32_t>(std::clamp<double>(wanted, every_ + 1, options_.max_every));
    every_ = std::min(every_, options_.max_every);
  } else if (every_ > 1 && now_costs < options_.overhead_limit / 2) {
    --every_;
  }
  if (every_ != before) {
    with_.clear();  // the newest steps decide, not those of another cadence
  }
}

bool Placer::beginStep(int64_t now_ns, uint64_t bytes, uint64_t at_once_bytes) {
  model_.beginStep(now_ns);
  learnOverhead(now_ns);
  step_begin_ns_ = now_ns;
  snapshot_ = bytes > 0 && wantsSnapshot();
  with_snapshot_ = snapshot_;
  if (snapshot_) {
    since_snapshot_ = 0;
    granted_[static_cast<size_t>(Tier::kAtOnce)] += std::min(bytes, at_once_bytes);
  }
  left_ = snapshot_ ? bytes - std::min(bytes, at_once_bytes) : 0;
  span_begin_ns_ = next_compute_copy_ns_ = now_ns;
  gap_open_ = false;
  gap_budget_ = 0;
  paper_gap_left_ = 0;
  last_gap_end_ns_ = -1;
  rebuild();  // also for another guard and other rates
  makePlan();
  if (snapshot_) {
    plan_.bytes[static_cast<size_t>(Tier::kAtOnce)] = bytes - left_;
  }
  return snapshot_;
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

void Placer::openGap(const ForecastSpan* foretold, int64_t now_ns) {
  gap_open_ = true;
  overran_ = false;
  gap_begin_ns_ = now_ns;
  const int64_t surprise = kSurpriseChunks * chunkNs(Tier::kGap);
  if (foretold == nullptr) {
    gap_until_ns_ = now_ns;
    gap_surprise_ns_ = now_ns + std::max(surprise, options_.model.min_gap_ns);
    return;
  }
  const auto guard = static_cast<int64_t>(guard_ * static_cast<double>(foretold->jitter_ns));
  gap_until_ns_ = now_ns + std::max<int64_t>(0, foretold->wait_ns - guard);
  // Past its length and the guard again it is no gap of the kind that was learnt.
  gap_surprise_ns_ = now_ns + foretold->wait_ns + std::max(guard, surprise);
  if (options_.policy == PlacementPolicy::kPaper && paper_gap_ns_ > 0) {
    gap_budget_ += static_cast<uint64_t>(static_cast<double>(plan_.bytes[static_cast<size_t>(Tier::kGap)]) *
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
  if (end_ns > begin_ns && bytes > 0) {
    // Times are cut to what a sane machine can do, so that one wrong reading does not stop copying.
    const double measured = std::clamp(static_cast<double>(bytes) / static_cast<double>(end_ns - begin_ns), 1e-4, 1e4);
    double& known = bytes_per_ns_[static_cast<size_t>(tier)];
    known += kRateGain * (measured - known);
  }
  if (tier != Tier::kGap) {
    return;
  }
  const bool past_the_end = !gap_open_ && last_gap_end_ns_ >= begin_ns && end_ns > last_gap_end_ns_;
  if (past_the_end) {
    longest_overrun_ns_ = std::max(longest_overrun_ns_, end_ns - last_gap_end_ns_);
    // The last chunk before a shorter end than foretold: the guard was too small.
    if (!overran_) {
      overran_ = true;
      guard_ = std::min(kMostGuard, guard_ * kGuardUp);
    }
  } else {
    guard_ = std::max(kLeastGuard, guard_ * kGuardDown);
  }
}

Grant Placer::ask(int64_t now_ns) {
  Grant grant;
  if (left_ == 0) {
    return grant;
  }
  const uint64_t chunk = std::min(options_.chunk_bytes, left_);
  const bool in_gap = gap_open_;
  const Tier tier = in_gap ? Tier::kGap : model_.communicating() ? Tier::kCommunication : Tier::kCompute;
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
    // What was assigned to a bubble is launched in it and runs on after its end: nothing calls it back.
    const uint64_t in_bubbles = plan_.bytes[static_cast<size_t>(Tier::kGap)];
    if (gap_budget_ > 0) {
      return give(std::min(chunk, gap_budget_), Grant::kNever);
    }
    if (!in_gap && left_ > in_bubbles) {
      return give(chunk, Grant::kNever);
    }
    const bool no_gap_left = model_.forecast() == nullptr || now_ns - step_begin_ns_ > until_gate_ns_;
    return no_gap_left ? give(chunk, Grant::kNever) : grant;
  }

  // What the gaps that are still to come will not hold.
  const size_t next_gap = model_.waitsBegun();
  const bool known =
      !gap_room_from_.empty() && next_gap < gap_room_from_.size() &&
      static_cast<double>(now_ns - step_begin_ns_) <= static_cast<double>(until_gate_ns_) * (kLatePercent / 100);
  const uint64_t to_come = known ? gap_room_from_[next_gap] : 0;
  if (in_gap) {
    const int64_t chunk_ns = chunkNs(Tier::kGap);
    if (now_ns + chunk_ns <= gap_until_ns_) {
      const uint64_t fits = bytesIn(gap_until_ns_ - now_ns, rate(Tier::kGap)) / options_.chunk_bytes;
      return give(std::max<uint64_t>(fits, 1) * options_.chunk_bytes, gap_until_ns_);
    }
    // The guard is worth keeping only while what it keeps out has a better place.
    if (now_ns >= gap_surprise_ns_ || left_ > to_come) {
      if (now_ns >= gap_surprise_ns_ || gap_until_ns_ > gap_begin_ns_) {
        return give(chunk, now_ns + chunk_ns);
      }
    }
    return later(gap_surprise_ns_);
  }
  if (left_ <= to_come) {
    return known ? later(step_begin_ns_ +
                         static_cast<int64_t>(static_cast<double>(until_gate_ns_) * (kLatePercent / 100)) + 1)
                 : grant;
  }
  const uint64_t short_of = left_ - to_come;
  // The compute that is left, from this span on, less what of it has passed.
  int64_t compute_ns = 0;
  if (known) {
    const Forecast& forecast = *model_.forecast();
    const int64_t here = next_gap < forecast.spans.size() ? forecast.spans[next_gap].compute_ns : 0;
    const int64_t passed = std::min(here, std::max<int64_t>(0, now_ns - span_begin_ns_));
    compute_ns = compute_from_[std::min(next_gap, compute_from_.size() - 1)] - passed;
  }
  const auto needed_ns = static_cast<int64_t>(static_cast<double>(short_of) / rate(Tier::kCompute));
  if (tier == Tier::kCommunication) {
    return needed_ns > compute_ns ? give(chunk, Grant::kNever) : grant;
  }
  // Evenly over the compute that is left: bursts hurt more than a trickle.
  if (now_ns < next_compute_copy_ns_) {
    return later(next_compute_copy_ns_);
  }
  const double spacing =
      needed_ns <= 0 ? 1.0 : std::max(1.0, static_cast<double>(compute_ns) / static_cast<double>(needed_ns));
  next_compute_copy_ns_ = now_ns + static_cast<int64_t>(spacing * static_cast<double>(chunkNs(Tier::kCompute)));
  return give(chunk, next_compute_copy_ns_);
}

uint64_t Placer::gate(int64_t now_ns) {
  // Counted as part of the schedule until gateDone() says what of it was waiting for copies.
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
