// When all ranks lay out their vaults together.
//
// One rank cannot do it alone: which ranks share which bytes is for all of them to agree on. A vote
// may ask for it (`plan_anew`), and votes that do not fit together ask for it, too; the outcome of
// that step tells all ranks. An outcome arrives at any time, so the ranks may be at different
// points of the program when they learn of it. They meet at the second point with a vote after the
// step in question, and every rank waits there for that outcome. To wait at points of one number is
// safe: no rank needs another one to go on from its point to reach its own
// (intercept/record/cut.h).
//
//   votes   s          s+1        s+2
//           asks       goes on    knows the outcome of s: all ranks plan
//
// Threads: one at a time (the engine's mutex). No clock inside. Errors: none.
#pragma once

#include <array>
#include <cstdint>
#include <set>

namespace reft {

// The step that had the ranks plan together at a point, and whether votes did not fit together.
struct PlanRound {
  int64_t step;  // PlanRounds::kNone: they do not plan
  bool parted;
};

class PlanRounds {
 public:
  static constexpr int64_t kNone = -1;

  // A point of the program at which this rank will vote; steps grow.
  void point(int64_t step);
  void voted(int64_t step);
  // The outcome of `step`. `parted`: the votes did not fit together.
  void outcome(int64_t step, bool plan_anew, bool parted);

  // Whether the outcome that decides about the newest point has arrived, or will not, because this
  // rank did not vote.
  bool known() const;
  // The step that had the ranks plan together at the newest point; kNone: they do not.
  int64_t due() const { return due_for_; }
  // Whether it is due because votes did not fit together.
  bool parted() const { return parted_; }
  // At the newest point, behind known() or a wait in vain: settles due().
  void settle();

 private:
  std::array<int64_t, 3> points_{kNone, kNone, kNone};  // the newest ones, newest last
  int64_t planned_at_ = kNone;                          // the newest point at which all planned
  int64_t asked_ = kNone, asked_parted_ = kNone;        // oldest step since then that asks for it
  std::set<int64_t> voted_, answered_;                  // of points_
  int64_t due_for_ = kNone;
  bool parted_ = false;
};

}  // namespace reft
