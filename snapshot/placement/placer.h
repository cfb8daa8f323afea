// Decides when to copy the chunks of a snapshot, so that training does not slow down.
//
// Three tiers, after REFT's hierarchical asynchronous snapshotting. Tier 1: gaps in which the
// device idles. Tier 2: overlap with compute, only for bytes that do not fit into the remaining
// gaps. Tier 3: overlap with communication, only for bytes that do not fit into tier 2 either. In a
// step without gaps, copies start at the beginning of the step. Bytes left at the gate, before the
// optimizer overwrites the weights, stall training. The owner copies chunks whose source the
// forward pass overwrites (at-once bytes) before the program point returns; the placer does not
// place them.
//
// The owner reports the rank's events (beginStep, waits, ops, gate). The copier requests one grant
// at a time with ask() and reports each copy with copied(). If it asks again after each chunk, it
// stops within one chunk of a gap's end, even if the forecast is wrong. Each gap of a step gets a
// share in proportion to its room, so that later gaps still have room for bytes that an earlier gap
// could not take.
//
// The guard adapts: a copy that runs past the end of a gap that was shorter than forecast widens
// it, a copy that ends in time narrows it. cadence.h decides how often to take a snapshot.
//
// Reads no clock, so a log can be replayed. Threads: one at a time (in an engine, the first copy
// thread). beginStep(), take(), foresee(), and waitBegin() when the forecast changes, are O(waits
// of a step); every other call is O(1). Errors: throws only std::bad_alloc.
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
  kEager,  // everything as soon as possible, as other asynchronous checkpointers do
  kSync,   // everything before the program point returns
  kPaper,  // REFT's Algorithm 1 with its published bubble formula, which overestimates the bubbles
           // of 1F1B
};
const char* placementPolicyName(PlacementPolicy policy);

enum class Tier : uint8_t { kAtOnce, kGap, kCompute, kCommunication, kGate };
inline constexpr size_t kTiers = 5;
const char* tierName(Tier tier);

struct PlacerOptions {
  PlacementPolicy policy = PlacementPolicy::kGap;
  uint64_t chunk_bytes = uint64_t{4} << 20;
  double bytes_per_sec = 2e9;  // copy rate until the first copy is measured
  // True: copies and communication share a path (one PCIe switch, the host's memory), so waits for
  // collectives are tier 3. False: they count as gaps.
  bool shared_link = true;
  // kPaper only.
  int stages = 1;
  int stage = 0;
  int64_t micro_batch_ns = 0;  // forward and backward of one micro-batch
  ScheduleModelOptions model;
};

// Permission to copy now. `bytes` is 0 or a whole number of chunks (the last chunk may be smaller).
// The copier stops after the chunk during which `until_ns` passes or the gap ends, and asks again.
// If `bytes` is 0, it asks again at `retry_ns` and after the next event.
struct Grant {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  uint64_t bytes = 0;
  int64_t until_ns = 0;
  int64_t retry_ns = kNever;
  Tier tier = Tier::kCompute;
};

// Planned placement of the bytes of a snapshot in a step, by the forecast at planning time.
struct PlacementPlan {
  std::array<uint64_t, kTiers> bytes{};  // by tier; kGate: expected stall
  std::vector<uint64_t> gap_bytes;  // kGap: per span of the forecast; whole chunks but for the last
  bool from_forecast = false;
};

class Placer {
 public:
  explicit Placer(PlacerOptions options);

  // The program point. `bytes`: size of the snapshot, 0 without one; the caller has already copied
  // `at_once_bytes` of it. `learn`: as in ScheduleModel::beginStep().
  void beginStep(int64_t now_ns, uint64_t bytes, uint64_t at_once_bytes = 0, bool learn = true);
  // Begins a snapshot in this step, after beginStep(now, 0).
  void take(PlacementPolicy policy, uint64_t chunk_bytes, uint64_t bytes, uint64_t at_once_bytes);
  void opBegin(const ScheduleOp& op, int64_t now_ns);
  void opDone(const ScheduleOp& op, int64_t now_ns);
  void waitBegin(const ScheduleOp& op, int64_t now_ns);
  void waitEnd(int64_t now_ns);
  // Call when the optimizer is about to overwrite the weights. Returns the bytes that must be
  // copied first; call gateDone() after that.
  uint64_t gate(int64_t now_ns);
  void gateDone(int64_t begin_ns, int64_t now_ns);

  Grant ask(int64_t now_ns);
  // Plans the placement of `bytes` of a snapshot in a whole step like the current forecast, under
  // kGap, for an owner that schedules a step's copies in advance. `past_the_guard`: bytes that do
  // not fit because of the guard still go into the gaps before they overlap with work. A copy that
  // ends late overlaps with work for part of its time, a copy outside the gaps for all of it.
  PlacementPlan foresee(uint64_t bytes, bool past_the_guard) const;
  // Reports a copy of `bytes` from a grant, which ran from `begin_ns` to `end_ns`.
  void copied(uint64_t bytes, Tier tier, int64_t begin_ns, int64_t end_ns);

  // Tier of a copy that begins now.
  Tier tier() const {
    return gap_open_ ? Tier::kGap : model_.communicating() ? Tier::kCommunication : Tier::kCompute;
  }
  bool inGap() const { return gap_open_; }

  const ScheduleModel& model() const { return model_; }
  const PlacementPlan& plan() const { return plan_; }
  uint64_t bytesLeft() const { return left_; }
  // The guard, in standard deviations of a gap's length.
  double guardJitters() const { return guard_; }
  double bytesPerSec(Tier tier) const { return rate(tier) * 1e9; }
  // Longest time that a copy has run past the end of the gap in which it was granted.
  int64_t longestOverrunNs() const { return longest_overrun_ns_; }
  // Bytes copied in `tier`, over all steps.
  uint64_t granted(Tier tier) const { return granted_[static_cast<size_t>(tier)]; }

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
  // Time per byte, because it adds up over chunks; a mean of rates would give fast chunks too much
  // weight.
  std::array<double, kTiers> ns_per_byte_{};
  std::array<bool, kTiers> measured_{};
  bool any_measured_ = false;
  std::array<uint64_t, kTiers> granted_{};

  // State of the current step. Suffix sums over the forecast's spans: room in gaps from wait i on,
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
  int64_t gap_until_ns_ = 0;     // forecast end of the open gap, less the guard
  int64_t gap_surprise_ns_ = 0;  // from here on the open gap is longer than forecast
  uint64_t gap_budget_ = 0;      // kPaper
  uint64_t gap_share_ = 0;       // remaining bytes assigned to the open gap
  int64_t last_gap_end_ns_ = -1;
  bool overran_ = false;
  uint64_t paper_gap_left_ = 0;  // kPaper: bytes assigned to bubbles
  int64_t paper_gap_ns_ = 0;

  double guard_ = 2.0;
  int64_t longest_overrun_ns_ = 0;
};

}  // namespace reft
