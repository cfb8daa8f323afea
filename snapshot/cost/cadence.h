// How often snapshots are taken, and how all ranks of a job come to the same interval.
//
// Without a limit on the overhead a snapshot is taken at every `base` steps. With a limit the
// interval is base·2^n: longer when the measured overhead exceeds the limit by more than its noise,
// shorter again when it is well below. n is at most kMostDoublings, and two snapshots are never
// more than `longest_ns` apart.
//
// **Agreement.** Ranks that disagreed on which steps have a snapshot would vote on different ones
// and commit none. One rank decides (rank 0 of the job). Its proposal rides on its vote, is stored
// beside the snapshot, and comes back to every rank with the outcome; a proposal counts once the
// snapshot that carried it is *committed*. A rank decides about a step only when it knows the
// outcomes of all steps that it has voted to have sealed. A committed step was sealed by every
// rank, so two ranks that decide about the same step know the same commits, hence the same
// proposal. A rank that knows too little votes against the step, and no other rank has to wait for
// it; only at steps that every possible interval contains may it take part all the same. A new
// incarnation begins with n = 0.
//
// Threads: one at a time (the engine's mutex). No clock, no allocation. Errors: none; proposals out
// of range are ignored.
#pragma once

#include <cstdint>
#include <limits>

#include "snapshot/cost/overhead_meter.h"

namespace reft {

struct CadenceOptions {
  uint32_t base = 1;
  int64_t limit_ppm = 0;  // of overhead; 0: always `base`
  bool decides = false;   // this rank's measurements count
  int64_t longest_ns = std::numeric_limits<int64_t>::max();
};

class Cadence {
 public:
  static constexpr uint8_t kMostDoublings = 6;
  // On the wire and in vaults: 0 = no proposal, n = base·2^(n-1).
  static constexpr uint8_t kMostProposal = kMostDoublings + 1;

  explicit Cadence(CadenceOptions options) : options_(options) {}

  // Whether ask() needs the outcomes of all snapshots so far. False: `step` has no snapshot, or
  // there is no limit to agree on.
  bool decidesAt(int64_t step) const;
  enum class Answer : uint8_t { kTake, kLeave, kVoteAgainst };
  // Whether `step` has a snapshot. Call it once for each step, in order.
  Answer ask(int64_t step, bool outcomes_known);
  void committed(int64_t step, uint8_t proposal);

  // What the vote of this rank carries.
  uint8_t proposal() const;
  // `is_current`: it was measured at the interval in force.
  void learn(const Overhead& overhead, bool is_current = true);
  // Whether snapshots cost more than the limit at the longest interval.
  bool exceedsAtLongest() const { return exceeds_; }
  void forgetExcess() { exceeds_ = false; }

  uint64_t every() const { return uint64_t{options_.base} << doublings_; }
  // The step whose commit brought this interval, equal on all ranks; -1: none.
  int64_t since() const { return since_; }

 private:
  bool isMultiple(int64_t step, uint8_t doublings) const;
  uint8_t least(int64_t ppm, double limit_ppm) const;

  CadenceOptions options_;
  uint8_t doublings_ = 0;      // in force
  uint8_t agreed_ = 0;         // doublings that the newest commit carried
  int64_t agreed_at_ = -1;     // step of that commit
  int64_t agreed_since_ = -1;  // first commit in a row that carried agreed_
  int64_t since_ = -1;         // agreed_since_ of doublings_
  uint8_t wanted_ = 0;         // doublings that this rank's votes carry
  bool exceeds_ = false;
  int64_t undecided_from_ = 0;  // first step that is not decided yet
};

}  // namespace reft
