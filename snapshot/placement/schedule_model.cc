#include "snapshot/placement/schedule_model.h"

#include <algorithm>
#include <cstdlib>

#include "intercept/base/hash.h"

namespace reft {

namespace {

// Cap on lengths, so that sums of bad input stay in range.
constexpr int64_t kMaxSpanNs = 1'000'000'000'000'000;
constexpr int64_t kMaxTimeNs = int64_t{1} << 62;
constexpr int kShapesUntilIgnored = 4;
constexpr int kShapesUntilTrusted = 16;
constexpr uint64_t kSlowPercent = 150;
constexpr uint32_t kSamplesForJitter = 4;
constexpr double kWorstError = 10;  // cap on the relative error of one gap

int64_t elapsed(int64_t from_ns, int64_t to_ns) {
  if (to_ns <= from_ns) {
    return 0;
  }
  const uint64_t span = static_cast<uint64_t>(to_ns) - static_cast<uint64_t>(from_ns);
  return static_cast<int64_t>(std::min<uint64_t>(span, kMaxSpanNs));
}

int64_t plus(int64_t sum, int64_t value) {
  return std::min(sum + value, kMaxSpanNs);
}

template <typename T>
T medianOf(std::vector<T>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

bool isGap(const ScheduleModelOptions& options, int64_t wait_ns, int64_t jitter_ns) {
  return wait_ns >= options.min_gap_ns &&
         static_cast<double>(wait_ns) > options.min_gap_jitters * static_cast<double>(jitter_ns);
}

bool isMessage(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kRecv || kind == OpKind::kRecvAnysource;
}

}  // namespace

ScheduleOp scheduleOp(OpKind kind, uint32_t group, int32_t peer, uint32_t tag, uint64_t bytes,
                      uint64_t signature) {
  ScheduleOp op;
  op.structure = hashCombine(
      hashCombine(hashCombine(static_cast<uint64_t>(kind) + 1, group), static_cast<uint64_t>(peer)),
      tag);
  op.shape = hashCombine(hashCombine(op.structure, bytes), signature);
  op.fills_link = !isMessage(kind) && bytes > kLatencyBytes;
  return op;
}

ScheduleOp scheduleOp(const OpEntry& entry) {
  return scheduleOp(entry.kind, entry.group, entry.peer, entry.tag, entry.bytes, entry.signature);
}

const char* stepClassName(StepClass step_class) {
  switch (step_class) {
    case StepClass::kFirst: return "first";
    case StepClass::kKnown: return "known";
    case StepClass::kSlow: return "slow";
    case StepClass::kReshaped: return "reshaped";
    case StepClass::kShort: return "short";
    case StepClass::kExtended: return "extended";
    case StepClass::kNew: return "new";
  }
  return "unknown";
}

void RecentSamples::add(int64_t value) {
  value = std::clamp<int64_t>(value, 0, kMaxSpanNs);
  if (count_ >= 3) {
    // Two values in a row agree with each other, but not with the rest: the level has moved.
    const int64_t before = values_[count_ - 1];
    const int64_t off = value - expected_;
    const int64_t off_before = before - expected_;
    const int64_t least = std::max(4 * jitter_, expected_ / 10);
    if ((off > 0) == (off_before > 0) && std::min(std::abs(off), std::abs(off_before)) > least &&
        std::abs(value - before) <= std::max(std::abs(off), std::abs(off_before)) / 3) {
      values_[0] = before;
      count_ = 1;
      carried_jitter_ = jitter_;
    }
  }
  if (count_ == kCapacity) {
    std::copy(values_.begin() + 1, values_.end(), values_.begin());
    --count_;
  }
  values_[count_++] = value;
  std::array<int64_t, kCapacity> sorted = values_;
  const auto middle = [&] {
    std::sort(sorted.begin(), sorted.begin() + count_);
    return count_ % 2 == 1 ? sorted[count_ / 2] : (sorted[count_ / 2 - 1] + sorted[count_ / 2]) / 2;
  };
  // With two samples, take the newer: the first step of a sequence often pays one-time costs.
  expected_ = count_ == 2 ? value : middle();
  for (uint32_t i = 0; i < count_; ++i) {
    sorted[i] = std::abs(values_[i] - expected_);
  }
  const int64_t deviation = middle() * 3 / 2;  // 1.48 for a normal distribution
  // Few samples give a poor estimate of the spread, so a floor applies. One sample is still enough
  // for a forecast: min_gap_jitters times its floor is less than the sample.
  const bool few = count_ < kSamplesForJitter;
  const int64_t floor = expected_ / (count_ == 1 ? 5 : few ? 20 : 100);
  jitter_ = std::max({deviation, floor, few ? carried_jitter_ : 0, int64_t{1}});
}

// One sequence of waits, with statistics over its steps.
struct ScheduleModel::Pattern {
  struct Span {
    uint64_t structure = 0, prefix_structure = 0, prefix_shape = 0;
    bool bubble = false;
    RecentSamples compute, communication, wait;
  };
  uint64_t structure = 0;
  uint64_t shape = 0;
  std::vector<Span> spans;
  RecentSamples tail_compute, tail_communication, period, until_gate;
  size_t steps = 0;
  uint64_t last_use = 0;
  Pattern* successor = nullptr;  // pattern that usually follows
  int successor_votes = 0;
  Forecast forecast;

  // Discards the lengths of the pattern's first step, a warm-up: allocations and first launches
  // made it longer than the second.
  void forgetWarmUp() {
    for (Span& span : spans) {
      span.compute = span.communication = span.wait = {};
    }
    tail_compute = tail_communication = period = until_gate = {};
  }

  void renew(const ScheduleModelOptions& options) {
    std::vector<int64_t> work;
    work.reserve(spans.size() + 1);
    for (const Span& span : spans) {
      work.push_back(span.compute.jitter());
    }
    work.push_back(tail_compute.jitter());
    const int64_t noise_ns = period.count() > 1 ? medianOf(work) : 0;  // one step shows no noise
    forecast.period_ns = period.expected();
    forecast.until_gate_ns = until_gate.expected();
    forecast.steps_seen = steps;
    forecast.spans.resize(spans.size() + 1);
    for (size_t i = 0; i < spans.size(); ++i) {
      const Span& span = spans[i];
      forecast.spans[i] = {span.compute.expected(),
                           span.communication.expected(),
                           span.wait.expected(),
                           span.wait.jitter(),
                           span.bubble,
                           false};
      forecast.spans[i].gap =
          isGap(options, span.wait.expected(), std::max(span.wait.jitter(), noise_ns));
    }
    forecast.spans.back() = {
        tail_compute.expected(), tail_communication.expected(), 0, 0, false, false};
  }
};

ScheduleModel::ScheduleModel(ScheduleModelOptions options) : options_(options) {
  recent_errors_.reserve(kRecentErrors);
}
ScheduleModel::~ScheduleModel() = default;
ScheduleModel::ScheduleModel(ScheduleModel&&) noexcept = default;
ScheduleModel& ScheduleModel::operator=(ScheduleModel&&) noexcept = default;

const Forecast* ScheduleModel::forecast() const {
  return active_ == nullptr ? nullptr : &active_->forecast;
}

void ScheduleModel::follow(Pattern* pattern) {
  if (pattern != active_) {
    active_ = pattern;
    ++changes_;
  }
}

void ScheduleModel::account(int64_t now_ns) {
  if (depth_ == 0 && gate_ns_ < 0) {
    int64_t& sum = in_flight_ > 0 ? communication_ns_ : compute_ns_;
    sum = plus(sum, elapsed(accounted_ns_, now_ns));
  }
  accounted_ns_ = std::max(accounted_ns_, now_ns);
}

void ScheduleModel::opBegin(const ScheduleOp& op, int64_t now_ns) {
  account(now_ns);
  ops_shape_ += hashCombine(op.shape, 1);  // a sum, because ops of two threads may swap order
  if (op.fills_link) {
    ++in_flight_;
  }
}

void ScheduleModel::opDone(const ScheduleOp& op, int64_t now_ns) {
  account(now_ns);
  if (op.fills_link && in_flight_ > 0) {
    --in_flight_;
  }
}

bool ScheduleModel::matchesSoFar(const Pattern& pattern, bool with_shape) const {
  const size_t i = waits_begun_ - 1;
  return i < pattern.spans.size() && pattern.spans[i].prefix_structure == prefix_structure_ &&
         (!with_shape || ignore_shapes_ || pattern.spans[i].prefix_shape == prefix_shape_);
}

const ForecastSpan* ScheduleModel::waitBegin(const ScheduleOp& op, int64_t now_ns) {
  account(now_ns);
  if (depth_++ > 0) {
    return foretold_;
  }
  wait_begin_ns_ = now_ns;
  open_bubble_ = !op.fills_link;
  foretold_ = nullptr;
  ++waits_begun_;
  if (waits_.size() >= kMaxWaits) {
    overfull_ = true;
    follow(nullptr);
    return nullptr;
  }
  prefix_structure_ = hashCombine(prefix_structure_, op.structure);
  prefix_shape_ = hashCombine(prefix_shape_, op.shape);
  waits_.push_back({op.structure, prefix_structure_, prefix_shape_, compute_ns_, communication_ns_,
                    0, open_bubble_});
  compute_ns_ = communication_ns_ = 0;
  bool exact = active_ != nullptr && matchesSoFar(*active_, true);
  if (!exact) {
    // Look for another known step: one with the same sizes, else one with other sizes. The most
    // recently used wins.
    Pattern* best = nullptr;
    for (const bool with_shape : {true, false}) {
      for (const auto& pattern : patterns_) {
        if (matchesSoFar(*pattern, with_shape) &&
            (best == nullptr || pattern->last_use > best->last_use)) {
          best = pattern.get();
        }
      }
      if (best != nullptr) {
        exact = with_shape;
        break;
      }
    }
    follow(best);
  }
  if (active_ == nullptr) {
    return nullptr;
  }
  foretold_copy_ = active_->forecast.spans[waits_begun_ - 1];
  // The previous step was of a new kind. This step may repeat it or return to the usual kind. Until
  // the waits differ, use the shorter forecast of the two.
  if (last_ != nullptr && last_ != active_ && last_->steps == 1 && matchesSoFar(*last_, true)) {
    const ForecastSpan& other = last_->forecast.spans[waits_begun_ - 1];
    if (other.wait_ns < foretold_copy_.wait_ns) {
      foretold_copy_ = other;
    }
  }
  if (!exact) {  // other sizes: the length is not reliable
    foretold_copy_.gap = false;
  }
  if (foretold_copy_.gap) {
    foretold_ = &foretold_copy_;
  }
  return foretold_;
}

void ScheduleModel::waitEnd(int64_t now_ns) {
  if (depth_ == 0 || --depth_ > 0) {
    return;
  }
  accounted_ns_ = std::max(accounted_ns_, now_ns);
  if (overfull_ || waits_.empty()) {
    return;
  }
  Wait& wait = waits_.back();
  wait.wait_ns = elapsed(wait_begin_ns_, now_ns);
  if (foretold_ != nullptr) {
    foretold_ns_ = plus(foretold_ns_, foretold_->wait_ns);
    const int64_t off_ns = std::abs(foretold_->wait_ns - wait.wait_ns);
    off_ns_ = plus(off_ns_, off_ns);
    // Cap the error: if the gap hardly occurred, the relative error would be meaninglessly large.
    const double error =
        static_cast<double>(off_ns) / static_cast<double>(std::max<int64_t>(wait.wait_ns, 1));
    step_errors_.push_back(static_cast<float>(std::min(error, kWorstError)));
  } else if (wait.wait_ns >= options_.min_gap_ns) {
    unforetold_ns_ = plus(unforetold_ns_, wait.wait_ns);
  }
  foretold_ = nullptr;
}

void ScheduleModel::gate(int64_t now_ns, int64_t stalled_ns) {
  account(now_ns);
  stalled_ns = std::clamp<int64_t>(stalled_ns, 0, kMaxSpanNs);
  if (gate_ns_ < 0) {
    // The stall is the last part of the current span.
    int64_t& sum = in_flight_ > 0 ? communication_ns_ : compute_ns_;
    sum = std::max<int64_t>(0, sum - stalled_ns);
    gate_ns_ = std::max<int64_t>(now_ns, 0);
  }
  stalled_ns_ = plus(stalled_ns_, stalled_ns);
}

StepClass ScheduleModel::classify(const Pattern* exact, const Pattern* like,
                                  int64_t period_ns) const {
  if (patterns_.empty()) {
    return StepClass::kFirst;
  }
  if (exact != nullptr) {
    const auto usual = static_cast<uint64_t>(exact->period.expected());
    return static_cast<uint64_t>(period_ns) > usual / 100 * kSlowPercent ? StepClass::kSlow
                                                                         : StepClass::kKnown;
  }
  if (like != nullptr) {
    return StepClass::kReshaped;
  }
  for (const auto& pattern : patterns_) {
    const auto same = [](const Wait& wait, const Pattern::Span& span) {
      return wait.structure == span.structure;
    };
    const auto& spans = pattern->spans;
    if (spans.empty()) {
      continue;
    }
    if (!waits_.empty() && waits_.size() < spans.size() &&
        std::equal(waits_.begin(), waits_.end(), spans.begin(), same)) {
      return StepClass::kShort;
    }
    if (waits_.size() > spans.size() &&
        (std::equal(
             spans.begin(), spans.end(), waits_.begin(),
             [&](const Pattern::Span& span, const Wait& wait) { return same(wait, span); }) ||
         std::equal(
             spans.rbegin(), spans.rend(), waits_.rbegin(),
             [&](const Pattern::Span& span, const Wait& wait) { return same(wait, span); }))) {
      return StepClass::kExtended;
    }
  }
  return StepClass::kNew;
}

ScheduleModel::Pattern* ScheduleModel::newPattern() {
  if (patterns_.size() < kMaxPatterns) {
    patterns_.push_back(std::make_unique<Pattern>());
    return patterns_.back().get();
  }
  Pattern* oldest = nullptr;
  for (const auto& pattern : patterns_) {
    if (pattern.get() != last_ && (oldest == nullptr || pattern->last_use < oldest->last_use)) {
      oldest = pattern.get();
    }
  }
  for (const auto& pattern : patterns_) {
    if (pattern->successor == oldest) {
      pattern->successor = nullptr;
      pattern->successor_votes = 0;
    }
  }
  if (active_ == oldest) {
    follow(nullptr);
  }
  *oldest = Pattern();
  return oldest;
}

void ScheduleModel::closeStep(int64_t now_ns, bool learn) {
  account(now_ns);
  const int64_t period = std::max<int64_t>(0, elapsed(step_begin_ns_, now_ns) - stalled_ns_);
  const int64_t until_gate =
      gate_ns_ < 0 ? period : std::max<int64_t>(0, elapsed(step_begin_ns_, gate_ns_) - stalled_ns_);
  const uint64_t structure = hashCombine(prefix_structure_, waits_.size());
  const uint64_t real_shape = hashCombine(prefix_shape_, ops_shape_);

  same_shape_in_a_row_ = real_shape == last_shape_ ? same_shape_in_a_row_ + 1 : 0;
  last_shape_ = real_shape;
  if (ignore_shapes_ && same_shape_in_a_row_ >= kShapesUntilTrusted) {
    ignore_shapes_ = false;
  }
  const uint64_t shape = ignore_shapes_ ? 0 : real_shape;

  Pattern* exact = nullptr;
  Pattern* like = nullptr;
  for (const auto& pattern : patterns_) {
    if (pattern->structure == structure) {
      like = like == nullptr || pattern->last_use > like->last_use ? pattern.get() : like;
      if (pattern->shape == shape) {
        exact = pattern.get();
      }
    }
  }
  errors_.last_class = overfull_ ? StepClass::kNew : classify(exact, like, period);
  errors_.foretold_ns = foretold_ns_;
  errors_.unforetold_ns = unforetold_ns_;
  errors_.foretold_gaps += step_errors_.size();
  for (const float error : step_errors_) {
    if (recent_errors_.size() < kRecentErrors) {
      recent_errors_.push_back(error);
    } else {
      recent_errors_[next_recent_] = error;
    }
    next_recent_ = (next_recent_ + 1) % kRecentErrors;
  }
  if (!step_errors_.empty()) {
    errors_.last_median = static_cast<double>(medianOf(step_errors_));
  }
  errors_.last_weighted =
      foretold_ns_ > 0 ? static_cast<double>(off_ns_) / static_cast<double>(foretold_ns_) : 0;
  ++errors_.steps;
  if (!learn || overfull_) {
    return;
  }

  new_shapes_in_a_row_ = exact == nullptr && like != nullptr ? new_shapes_in_a_row_ + 1 : 0;
  if (new_shapes_in_a_row_ >= kShapesUntilIgnored) {
    ignore_shapes_ = true;
    new_shapes_in_a_row_ = 0;
    like->shape = 0;
    exact = like;
  }
  const bool is_new = exact == nullptr;
  Pattern* pattern = is_new ? newPattern() : exact;
  if (is_new) {
    pattern->structure = structure;
    pattern->shape = shape;
    pattern->spans.resize(waits_.size());
  }
  if (pattern->steps == 1 && pattern->period.expected() / 10 * 9 > period) {
    pattern->forgetWarmUp();
  }
  for (size_t i = 0; i < waits_.size() && i < pattern->spans.size(); ++i) {
    Pattern::Span& span = pattern->spans[i];
    const Wait& wait = waits_[i];
    span.structure = wait.structure;
    span.prefix_structure = wait.prefix_structure;
    span.prefix_shape = wait.prefix_shape;
    span.bubble = wait.bubble;
    span.compute.add(wait.compute_ns);
    span.communication.add(wait.communication_ns);
    span.wait.add(wait.wait_ns);
  }
  pattern->tail_compute.add(compute_ns_);
  pattern->tail_communication.add(communication_ns_);
  pattern->period.add(period);
  pattern->until_gate.add(until_gate);
  ++pattern->steps;
  pattern->last_use = ++next_use_;
  pattern->renew(options_);

  if (last_ != nullptr) {
    if (last_->successor == pattern) {
      last_->successor_votes = std::min(last_->successor_votes + 1, 3);
    } else if (last_->successor_votes > 0 && --last_->successor_votes > 0) {
      // an exception so far: keep the successor
    } else {
      last_->successor = pattern;
      last_->successor_votes = 1;
    }
  }
  // After a new kind of step, the usual kind is likelier than another new one. If it is not, the
  // first waits correct the choice.
  Pattern* next = pattern->successor;
  if (next == nullptr) {
    next = is_new && last_ != nullptr ? last_ : pattern;
  }
  last_ = pattern;
  follow(next);
}

void ScheduleModel::beginStep(int64_t now_ns, bool learn) {
  if (in_step_) {
    closeStep(now_ns, learn);
  }
  ++steps_;
  in_step_ = true;
  overfull_ = false;
  step_begin_ns_ = accounted_ns_ = now_ns;
  gate_ns_ = -1;
  stalled_ns_ = 0;
  compute_ns_ = communication_ns_ = 0;
  depth_ = in_flight_ = 0;
  foretold_ = nullptr;
  waits_begun_ = 0;
  prefix_structure_ = prefix_shape_ = ops_shape_ = 0;
  waits_.clear();
  step_errors_.clear();
  foretold_ns_ = unforetold_ns_ = off_ns_ = 0;
}

ScheduleModel::Errors ScheduleModel::errors() const {
  Errors result = errors_;
  if (!recent_errors_.empty()) {
    std::vector<float> sorted = recent_errors_;
    result.recent_median = static_cast<double>(medianOf(sorted));
  }
  return result;
}

void ScheduleModel::replay(std::span<const OpEntry> records) {
  enum class What : uint8_t {
    kDone,
    kWaitEnd,
    kStep,
    kBegin,
    kWaitBegin
  };  // in this order at equal times
  struct Event {
    int64_t at_ns;
    What what;
    uint32_t record;
  };
  std::vector<Event> events;
  events.reserve(records.size() * 4);
  const auto add = [&](uint64_t at_ns, What what, size_t record) {
    if (at_ns != 0) {
      events.push_back({static_cast<int64_t>(std::min<uint64_t>(at_ns, kMaxTimeNs)), what,
                        static_cast<uint32_t>(record)});
    }
  };
  for (size_t i = 0; i < records.size(); ++i) {
    const OpEntry& entry = records[i];
    if (entry.kind == OpKind::kStep) {
      add(entry.begin_ns, What::kStep, i);
      continue;
    }
    add(entry.begin_ns, What::kBegin, i);
    add(entry.wait_begin_ns, What::kWaitBegin, i);
    if (entry.wait_begin_ns != 0 && entry.wait_end_ns != 0) {
      add(std::max(entry.wait_end_ns, entry.wait_begin_ns + 1), What::kWaitEnd, i);
    }
    add(entry.done_ns, What::kDone, i);
  }
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.at_ns != b.at_ns ? a.at_ns < b.at_ns : a.what < b.what;
  });
  for (const Event& event : events) {
    const ScheduleOp op = scheduleOp(records[event.record]);
    switch (event.what) {
      case What::kStep: beginStep(event.at_ns); break;
      case What::kBegin: opBegin(op, event.at_ns); break;
      case What::kWaitBegin: waitBegin(op, event.at_ns); break;
      case What::kWaitEnd: waitEnd(event.at_ns); break;
      case What::kDone: opDone(op, event.at_ns); break;
    }
  }
}

}  // namespace reft
