// Learns from a rank's ops when the device will idle in the next step.
//
// A step runs from one program point (the return of the closing optimizer step) to the next. The
// model represents it as a sequence of waits with work between them. It keeps a few such sequences
// (training steps, last batches, steps with an evaluation), with the recent lengths of every wait.
// At each wait it forecasts how long the wait will last, and how reliable that forecast is. It
// compares each forecast with the outcome, so it knows its own error.
//
// A wait is a bubble (the other side of a message is not ready, or other ranks have not reached a
// small collective) or communication (a large collective: the device idles, but the link is busy).
// Overlapping waits of several threads count as one.
//
// The model reads no clock. Time is an argument, in nanoseconds of any monotonic clock, so a log
// can be replayed. Events may arrive in any order and with any time; bad input only makes forecasts
// bad. Marks cost O(1), beginStep() O(waits of a step).
//
// Threads: one at a time. Errors: throws only std::bad_alloc; memory is bounded (kMaxPatterns,
// kMaxWaits).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "intercept/record/op_log.h"

namespace reft {

// What identifies an op from one step to the next.
struct ScheduleOp {
  uint64_t structure = 0;   // kind, group, peer, tag: the same for another batch size
  uint64_t shape = 0;       // bytes and element counts
  bool fills_link = false;  // a collective of more than kLatencyBytes
};
ScheduleOp scheduleOp(const OpEntry& entry);
ScheduleOp scheduleOp(OpKind kind, uint32_t group, int32_t peer, uint32_t tag, uint64_t bytes,
                      uint64_t signature = 0);

// The newest observations of one length: the expected value and its jitter. Two observations in a
// row that agree with each other, but not with the rest, replace all older ones.
class RecentSamples {
 public:
  static constexpr size_t kCapacity = 8;
  void add(int64_t value);
  size_t count() const { return count_; }
  int64_t expected() const { return expected_; }  // median; the newer of two
  // Robust estimate of one standard deviation; never 0 after the first add().
  int64_t jitter() const { return jitter_; }

 private:
  std::array<int64_t, kCapacity> values_{};  // oldest first
  uint32_t count_ = 0;
  int64_t expected_ = 0;
  int64_t jitter_ = 0;
  int64_t carried_jitter_ = 0;  // jitter of the replaced samples, used while new ones are few
};

// One span of a forecast step: the work before a wait, and the wait. The last span has no wait.
struct ForecastSpan {
  int64_t compute_ns = 0;        // work before the wait, no large collective in flight
  int64_t communication_ns = 0;  // work before the wait, a large collective in flight
  int64_t wait_ns = 0;
  int64_t jitter_ns = 0;  // jitter of wait_ns
  bool bubble = false;    // false: the wait is for a large collective
  bool gap = false;       // the wait is long and regular enough to plan copies in it
};

struct Forecast {
  int64_t period_ns = 0;      // program point to program point
  int64_t until_gate_ns = 0;  // program point to the next optimizer step
  std::vector<ForecastSpan> spans;
  size_t steps_seen = 0;  // steps that the forecast was learned from
};

// How a finished step compares with the known sequences.
enum class StepClass : uint8_t {
  kFirst,     // no known sequence yet
  kKnown,     // one of the known sequences
  kSlow,      // a known sequence that took over 1.5 times its usual time
  kReshaped,  // a known sequence with other sizes: a last batch, another sequence length
  kShort,     // only the start of a known sequence
  kExtended,  // a known sequence with extra waits before or after it: an evaluation
  kNew,
};
const char* stepClassName(StepClass step_class);

struct ScheduleModelOptions {
  int64_t min_gap_ns = 100'000;  // shorter waits are not gaps
  // A wait counts as a gap only if it is longer than this many times its own jitter, and this many
  // times the median jitter of the step's compute. Shorter waits are noise between ranks.
  double min_gap_jitters = 4.0;
};

class ScheduleModel {
 public:
  static constexpr size_t kMaxPatterns = 8;
  static constexpr size_t kMaxWaits = 8192;  // per step; longer steps are not learned

  explicit ScheduleModel(ScheduleModelOptions options = {});
  ~ScheduleModel();
  ScheduleModel(ScheduleModel&&) noexcept;
  ScheduleModel& operator=(ScheduleModel&&) noexcept;

  // The program point: ends a step and begins the next. Pass `learn` false if the step that ends
  // was unusual (a restore, say): the model compares it, but does not learn from it.
  void beginStep(int64_t now_ns, bool learn = true);
  // Call before the optimizer overwrites the weights; the time after it is no room for copies. The
  // last `stalled_ns` before it were a stall for the snapshot itself, and are not part of the
  // schedule.
  void gate(int64_t now_ns, int64_t stalled_ns);
  void opBegin(const ScheduleOp& op, int64_t now_ns);
  void opDone(const ScheduleOp& op, int64_t now_ns);
  // Returns the forecast of the wait, or nullptr if it is not forecast as a gap (unknown, too short
  // or too irregular). Valid until the next call.
  const ForecastSpan* waitBegin(const ScheduleOp& op, int64_t now_ns);
  void waitEnd(int64_t now_ns);

  // Replays records, oldest first, as the calls above; kStep records are program points. A wait
  // without an end stays open. A log may be replayed in parts, one call per part; a part must not
  // begin before the previous part ends.
  void replay(std::span<const OpEntry> records);

  // Forecast of the current step; nullptr if nothing is known. When the waits of the step no longer
  // match it, the model switches to another known step, or to nullptr if none matches. Each switch
  // increments forecastChanges().
  const Forecast* forecast() const;
  uint64_t forecastChanges() const { return changes_; }
  // Number of waits begun in this step. It is the index of the forecast span whose work is running,
  // or, during a wait, of the span after it.
  size_t waitsBegun() const { return waits_begun_; }
  bool waiting() const { return depth_ > 0; }
  bool inBubble() const { return depth_ > 0 && open_bubble_; }
  bool communicating() const { return in_flight_ > 0 || (depth_ > 0 && !open_bubble_); }

  struct Errors {
    StepClass last_class = StepClass::kFirst;
    uint64_t steps = 0;          // finished steps
    uint64_t foretold_gaps = 0;  // forecast gaps that occurred, over all steps
    // Median of |forecast - actual| / actual over the gaps of the last step with a forecast gap.
    double last_median = 0;
    // Last step: sum of |forecast - actual| / sum of forecasts; 0 without forecasts.
    double last_weighted = 0;
    double recent_median = 0;   // as last_median, over the newest kRecentErrors gaps
    int64_t foretold_ns = 0;    // forecast gap time of the last step
    int64_t unforetold_ns = 0;  // last step: waits of at least min_gap_ns without a forecast
  };
  static constexpr size_t kRecentErrors = 512;
  Errors errors() const;

 private:
  struct Pattern;
  struct Wait {
    uint64_t structure, prefix_structure, prefix_shape;
    int64_t compute_ns, communication_ns, wait_ns;
    bool bubble;
  };

  void closeStep(int64_t now_ns, bool learn);
  void account(int64_t now_ns);
  void follow(Pattern* pattern);
  bool matchesSoFar(const Pattern& pattern, bool with_shape) const;
  StepClass classify(const Pattern* exact, const Pattern* like, int64_t period_ns) const;
  Pattern* newPattern();

  ScheduleModelOptions options_;
  std::vector<std::unique_ptr<Pattern>> patterns_;
  Pattern* active_ = nullptr;  // pattern that the current step matches so far
  Pattern* last_ = nullptr;    // pattern of the previous step
  uint64_t changes_ = 0;
  uint64_t steps_ = 0;
  uint64_t next_use_ = 0;
  int new_shapes_in_a_row_ = 0;
  int same_shape_in_a_row_ = 0;
  uint64_t last_shape_ = 0;
  bool ignore_shapes_ = false;  // sizes change at every step, so they identify nothing

  bool in_step_ = false;
  bool overfull_ = false;
  int64_t step_begin_ns_ = 0;
  int64_t gate_ns_ = -1;
  int64_t stalled_ns_ = 0;
  int64_t accounted_ns_ = 0;
  int64_t compute_ns_ = 0;        // since the last wait
  int64_t communication_ns_ = 0;  // since the last wait
  int64_t wait_begin_ns_ = 0;
  uint32_t depth_ = 0;
  uint32_t in_flight_ = 0;
  bool open_bubble_ = false;
  const ForecastSpan* foretold_ = nullptr;
  ForecastSpan foretold_copy_;
  size_t waits_begun_ = 0;
  uint64_t prefix_structure_ = 0;
  uint64_t prefix_shape_ = 0;
  uint64_t ops_shape_ = 0;  // hash of all ops begun, independent of their order
  std::vector<Wait> waits_;

  std::vector<float> step_errors_;
  std::vector<float> recent_errors_;
  size_t next_recent_ = 0;
  int64_t foretold_ns_ = 0;
  int64_t off_ns_ = 0;
  int64_t unforetold_ns_ = 0;
  Errors errors_;
};

}  // namespace reft
