// Decides when the chunks of a snapshot are copied, so that training does not feel it.
//
// Three tiers, after REFT's hierarchical asynchronous snapshotting: first the gaps in which the
// device idles; under compute only what does not fit into the gaps to come; under communication
// only what does not fit there either. A step without gaps is copied at its beginning. What is left
// at the gate, before the weights are overwritten, stalls training. Chunks whose source forward
// rewrites (at-once bytes) are copied before the program point returns; placement does not see
// them.
//
// The owner reports what happens to the rank (beginStep, waits, ops, gate). The copier calls ask()
// for one grant at a time and reports it with copied(). A copier that asks again after each chunk
// stops within one chunk of a gap's end, however wrong the forecast was. The gaps of a step get
// shares in proportion to their room, so that bytes that one gap fails to hold find room in later
// ones.
//
// Learns in both directions: copies that ran past the end of gaps widen the guard, gaps that were
// kept well narrow it. cadence.h decides how often there is a snapshot.
//
// No clock inside; replayable. Threads: one at a time (in an engine the first copy thread). Every
// call is O(1) besides beginStep, which is O(waits of a step). Errors: none are thrown besides
// std::bad_alloc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "snapshot/placement/schedule_model.h"

namespace reft {

enum class PlacementPolicy : uint8_t {
  kGap,    // the three tiers
  kEager,  // everything as soon as possible, as asynchronous checkpointing does elsewhere
  kSync,   // everything before the program point returns
  kPaper,  // REFT's Algorithm 1 with its printed bubble formula, which is longer than the bubbles
           // of 1F1B are
};
const char* placementPolicyName(PlacementPolicy policy);

enum class Tier : uint8_t { kAtOnce, kGap, kCompute, kCommunication, kGate };
inline constexpr size_t kTiers = 5;
const char* tierName(Tier tier);

struct PlacerOptions {
  PlacementPolicy policy = PlacementPolicy::kGap;
  uint64_t chunk_bytes = uint64_t{4} << 20;
  double bytes_per_sec = 2e9;  // of copying, until the first copy was measured
  // Copies take the way that communication takes (one PCIe switch, the host's memory): waits for
  // collectives are then tier
  // 3. False: the device idles in them as in any gap.
  bool shared_link = true;
  // kPaper only.
  int stages = 1;
  int stage = 0;
  int64_t micro_batch_ns = 0;  // forward and backward of one micro-batch
  ScheduleModelOptions model;
};

// What may be copied now. `bytes` is 0 or whole chunks (less for the last one). A copier stops
// after the chunk in which `until_ns` passes or the gap ends, and asks again. Without bytes: ask
// again at `retry_ns`, and after the next event.
struct Grant {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  uint64_t bytes = 0;
  int64_t until_ns = 0;
  int64_t retry_ns = kNever;
  Tier tier = Tier::kCompute;
};

// Where the bytes of a step shall go by the forecast at its beginning.
struct PlacementPlan {
  std::array<uint64_t, kTiers> bytes{};  // by tier; kGate: expected to stall
  std::vector<uint64_t> gap_bytes;       // per wait of the forecast; whole chunks
  bool from_forecast = false;
};

class Placer {
 public:
  explicit Placer(PlacerOptions options);

  // The program point. `bytes`: of the snapshot, 0 without one; the caller has copied
  // `at_once_bytes` of them already.
  void beginStep(int64_t now_ns, uint64_t bytes, uint64_t at_once_bytes = 0, bool learn = true);
  // After beginStep(now, 0): a snapshot begins in this step.
  void take(PlacementPolicy policy, uint64_t chunk_bytes, uint64_t bytes, uint64_t at_once_bytes);
  void opBegin(const ScheduleOp& op, int64_t now_ns);
  void opDone(const ScheduleOp& op, int64_t now_ns);
  void waitBegin(const ScheduleOp& op, int64_t now_ns);
  void waitEnd(int64_t now_ns);
  // The optimizer is about to overwrite the weights. Returns the bytes that must be copied now;
  // then gateDone.
  uint64_t gate(int64_t now_ns);
  void gateDone(int64_t begin_ns, int64_t now_ns);

  Grant ask(int64_t now_ns);
  // Where `bytes` of a snapshot would go in a whole step like the one forecast now, under kGap, for
  // an owner that orders a step's copies in advance. `past_the_guard`: bytes that the guard keeps
  // out of gaps fill them all the same before they go beside work: a copy that ends late runs
  // beside work for a part of its time, one beside work for all of it.
  PlacementPlan foresee(uint64_t bytes, bool past_the_guard) const;
  // A copy of `bytes` from a grant ran from `begin_ns` to `end_ns`.
  void copied(uint64_t bytes, Tier tier, int64_t begin_ns, int64_t end_ns);

  // What a copy that began now would count as.
  Tier tier() const {
    return gap_open_ ? Tier::kGap : model_.communicating() ? Tier::kCommunication : Tier::kCompute;
  }
  bool inGap() const { return gap_open_; }

  const ScheduleModel& model() const { return model_; }
  const PlacementPlan& plan() const { return plan_; }
  uint64_t bytesLeft() const { return left_; }
  double guardJitters() const {
    return guard_;
  }  // the guard, in standard deviations of a gap's length
  double bytesPerSec(Tier tier) const { return rate(tier) * 1e9; }
  // Longest time by which a granted copy has run past the end of the gap it was granted in.
  int64_t longestOverrunNs() const { return longest_overrun_ns_; }
  uint64_t granted(Tier tier) const {
    return granted_[static_cast<size_t>(tier)];
  }  // bytes copied, over all steps

 private:
  bool isGap() const;
  uint64_t roomIn(const ForecastSpan& span, double guard_jitters) const;
  uint64_t fillGaps(const Forecast& forecast, double guard_jitters, uint64_t bytes,
                    std::vector<uint64_t>& gap_bytes) const;
  void rebuild();
  void makePlan();
  void openGap(const ForecastSpan* foretold, int64_t now_ns);
  double rate(Tier tier) const { return 1 / ns_per_byte_[static_cast<size_t>(tier)]; }
  void learnRate(Tier tier, uint64_t bytes, int64_t span_ns);
  uint64_t shareOf(const ForecastSpan& gap) const;
  int64_t chunkNs(Tier tier) const;

  PlacerOptions options_;
  ScheduleModel model_;
  PlacementPlan plan_;
  // Time per byte, not bytes per time, is what adds up over chunks: the mean of rates would believe
  // the fast ones too much.
  std::array<double, kTiers> ns_per_byte_{};
  std::array<bool, kTiers> measured_{};
  bool any_measured_ = false;
  std::array<uint64_t, kTiers> granted_{};

  // Of the running step. Suffix sums over the forecast's spans: room in gaps from wait i on,
  // compute from span i on.
  std::vector<uint64_t> gap_room_from_;
  std::vector<int64_t> compute_from_;
  uint64_t seen_changes_ = ~uint64_t{0};
  int64_t step_begin_ns_ = -1;
  int64_t until_gate_ns_ = 0;
  uint64_t left_ = 0;
  bool snapshot_ = false;
  int64_t span_begin_ns_ = 0;  // when the work since the last wait began
  int64_t next_compute_copy_ns_ = 0;
  bool gap_open_ = false;
  int64_t gap_begin_ns_ = 0;
  int64_t gap_until_ns_ = 0;     // with the guard
  int64_t gap_surprise_ns_ = 0;  // it lasts longer than foretold from here on
  uint64_t gap_budget_ = 0;      // kPaper
  uint64_t gap_share_ = 0;       // of what is left, for the gap that is open
  int64_t last_gap_end_ns_ = -1;
  bool overran_ = false;
  uint64_t paper_gap_left_ = 0;  // kPaper: bytes assigned to bubbles
  int64_t paper_gap_ns_ = 0;

  double guard_ = 2.0;
  int64_t longest_overrun_ns_ = 0;
};

}  // namespace reft
