// How often snapshots are taken, and how all ranks of a job come to do the same.
//
// A snapshot at every `base` steps; with a limit on what they may cost, at every base·2^n: rarer
// when the measured overhead exceeds the limit by more than its noise, frequent again when it is
// well below. At most 2^kMostDoublings, and never so rare that `longest_ns` passes between two.
//
// **Agreement.** Ranks that disagreed on which steps have a snapshot would vote on different ones
// and commit none. One rank decides (rank 0 of the job). What it wishes rides on its vote, is
// stored beside the snapshot it belongs to, and comes back to every rank with the outcome; a wish
// counts once the snapshot that carried it is *committed*. A rank decides about a step only when it
// knows the outcomes of all steps that it has voted to have sealed. A committed step was sealed by
// every rank, so two ranks that decide about the same step know the same commits, hence the same
// wish. A rank that does not know enough votes against the step, which nobody needs to wait for;
// only at steps that every possible interval contains may it take part all the same. A new
// incarnation begins with 1.
//
// Threads: one at a time (the engine's mutex). No clock, no allocation. Errors: none; wishes out of
// range are ignored.
#pragma once

#include <cstdint>
#include <limits>

#include "snapshot/cost/overhead_meter.h"

namespace reft {

struct CadenceOptions {
  uint32_t base = 1;
  int64_t limit_ppm = 0;  // 0: always `base`, nothing to agree on
  bool decides = false;   // this rank's measurements count
  int64_t longest_ns = std::numeric_limits<int64_t>::max();
};

class Cadence {
 public:
  static constexpr uint8_t kMostDoublings = 6;
  // On the wire and in vaults: 0 = nothing said, n = base·2^(n-1).
  static constexpr uint8_t kMostWish = kMostDoublings + 1;

  explicit Cadence(CadenceOptions options) : options_(options) {}

  // Whether something has to be decided about `step`, so that the outcomes have to be known. False:
  // it has no snapshot, or there is nothing to agree on.
  bool decidesAt(int64_t step) const;
  enum class Answer : uint8_t { kTake, kLeave, kVoteAgainst };
  // Whether `step` has a snapshot. To be asked once for each step, which must grow.
  Answer ask(int64_t step, bool outcomes_known);
  void committed(int64_t step, uint8_t wish);

  // What the vote of this rank shall say.
  uint8_t wish() const;
  void learn(const Overhead& overhead);

  uint64_t every() const { return uint64_t{options_.base} << doublings_; }
  // The step whose commit brought this interval, the same on all ranks; -1: none did.
  int64_t since() const { return since_; }

 private:
  bool isMultiple(int64_t step, uint8_t doublings) const;
  uint8_t least(int64_t ppm, double limit_ppm) const;

  CadenceOptions options_;
  uint8_t doublings_ = 0;       // that steps are decided by
  uint8_t told_ = 0;            // by the newest commit
  int64_t told_by_ = -1;        // its step
  int64_t told_since_ = -1;     // the first commit that said so
  int64_t since_ = -1;          // that of doublings_
  uint8_t wished_ = 0;          // doublings
  int64_t undecided_from_ = 0;  // steps before it have no snapshot, by what was decided
};

}  // namespace reft
