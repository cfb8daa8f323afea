// Learns from a rank's ops when the device will idle in the next step.
//
// A step reaches from one program point (the return of the closing optimizer step) to the next. The
// model sees it as a sequence of waits with the work between them. It keeps a few such sequences
// with the recent lengths of every wait (training steps, last batches, steps with an evaluation in
// them), and forecasts at each wait how long it will last and how sure that is. It compares each
// forecast with what came, so it knows its own error.
//
// A wait is a bubble (the other side of a message is not ready, other ranks have not come to a
// small collective) or communication (a large collective: the device idles, but the link is at
// work). Overlapping waits of several threads count as one.
//
// No clock inside: time is an argument, nanoseconds of any monotonic clock, so a log can be
// replayed. Events may come in any order and with any time; nonsense only makes forecasts bad.
// Marks cost O(1), beginStep() O(waits of a step).
//
// Threads: one at a time. Errors: none are thrown besides std::bad_alloc; memory is bounded
// (kMaxPatterns, kMaxWaits).
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

// The newest few observations of one length: what to expect, and how far off that may be. A level
// that two observations in a row agree on replaces the old one.
class RecentSamples {
 public:
  static constexpr size_t kCapacity = 8;
  void add(int64_t value);
  size_t count() const { return count_; }
  int64_t expected() const { return expected_; }  // median; of two, the newer
  int64_t jitter() const {
    return jitter_;
  }  // one standard deviation, robustly; never 0 once something was added

 private:
  std::array<int64_t, kCapacity> values_{};  // oldest first
  uint32_t count_ = 0;
  int64_t expected_ = 0;
  int64_t jitter_ = 0;
  int64_t carried_jitter_ = 0;  // of the level before, until this one has shown its own
};

// One span of the step that is forecast: work up to a wait, and the wait. The last one has no wait.
struct ForecastSpan {
  int64_t compute_ns = 0;        // before the wait, nothing in flight
  int64_t communication_ns = 0;  // before the wait, with a large collective in flight
  int64_t wait_ns = 0;
  int64_t jitter_ns = 0;  // of wait_ns
  bool bubble = false;    // else the wait is for a large collective
  bool gap = false;       // the wait is long and regular enough to be relied on
};

struct Forecast {
  int64_t period_ns = 0;      // program point to program point
  int64_t until_gate_ns = 0;  // program point to the next optimizer step
  std::vector<ForecastSpan> spans;
  size_t steps_seen = 0;  // that this is learnt from
};

// How a step that ended compares with what is known.
enum class StepClass : uint8_t {
  kFirst,     // nothing to compare with
  kKnown,     // one of the known sequences
  kSlow,      // known, but took more than half as long again
  kReshaped,  // a known sequence with other sizes: a last batch, another sequence length
  kShort,     // the beginning of a known sequence
  kExtended,  // a known sequence and more before or after it: an evaluation
  kNew,
};
const char* stepClassName(StepClass step_class);

struct ScheduleModelOptions {
  int64_t min_gap_ns = 100'000;  // shorter waits are no gaps
  // A gap is foretold only if it is longer than so many times its jitter and that of the step's
  // work: shorter ones are noise between ranks.
  double min_gap_jitters = 4.0;
};

class ScheduleModel {
 public:
  static constexpr size_t kMaxPatterns = 8;
  static constexpr size_t kMaxWaits = 8192;  // of a step; longer ones are not learnt

  explicit ScheduleModel(ScheduleModelOptions options = {});
  ~ScheduleModel();
  ScheduleModel(ScheduleModel&&) noexcept;
  ScheduleModel& operator=(ScheduleModel&&) noexcept;

  // The program point: ends a step and begins the next. `learn` false: the step that ends was not
  // as usual (a restore, say); it is compared, not learnt.
  void beginStep(int64_t now_ns, bool learn = true);
  // Before the closing optimizer step; what follows is not room for copies. `stalled_ns` of the
  // time before were spent waiting for the snapshot itself, and are not part of the schedule.
  void gate(int64_t now_ns, int64_t stalled_ns);
  void opBegin(const ScheduleOp& op, int64_t now_ns);
  void opDone(const ScheduleOp& op, int64_t now_ns);
  // What the wait is expected to be; nullptr if it is not foretold (unknown, or too short). Valid
  // until the next call.
  const ForecastSpan* waitBegin(const ScheduleOp& op, int64_t now_ns);
  void waitEnd(int64_t now_ns);

  // Replays records, oldest first, as the calls above; kStep records are program points. A wait
  // that has not ended stays open. Calls may follow one another with the parts of one log; a part
  // must not begin before the end of the one before.
  void replay(std::span<const OpEntry> records);

  // The step that has begun; nullptr while nothing is known. It is replaced during the step when
  // the waits show that this is another known step than was expected (forecastChanges() then
  // grows), and becomes nullptr when none fits.
  const Forecast* forecast() const;
  uint64_t forecastChanges() const { return changes_; }
  // Waits of this step that have begun: the index of the forecast's span that comes next, or whose
  // wait is open.
  size_t waitsBegun() const { return waits_begun_; }
  bool waiting() const { return depth_ > 0; }
  bool inBubble() const { return depth_ > 0 && open_bubble_; }
  bool communicating() const { return in_flight_ > 0 || (depth_ > 0 && !open_bubble_); }

  struct Errors {
    StepClass last_class = StepClass::kFirst;
    uint64_t steps = 0;          // ended
    uint64_t foretold_gaps = 0;  // that came, over all steps
    double last_median =
        0;  // |foretold - real| / real over the foretold gaps of the last step with one
    double last_weighted =
        0;  // of the last step: sum of |foretold - real| over sum of foretold; 0 without any
    double recent_median = 0;   // the same over the newest kRecentErrors gaps
    int64_t foretold_ns = 0;    // of the last step
    int64_t unforetold_ns = 0;  // waits of the last step that were gaps and not foretold
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
  Pattern* active_ = nullptr;  // what the running step is taken for
  Pattern* last_ = nullptr;    // of the step before
  uint64_t changes_ = 0;
  uint64_t steps_ = 0;
  uint64_t next_use_ = 0;
  int new_shapes_in_a_row_ = 0;
  int same_shape_in_a_row_ = 0;
  uint64_t last_shape_ = 0;
  bool ignore_shapes_ = false;  // sizes change at every step: they tell nothing

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
  uint64_t ops_shape_ = 0;  // of all ops begun, in any order
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
