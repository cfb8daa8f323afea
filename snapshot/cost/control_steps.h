// Which steps are control steps: steps with no copy beside them, for the others to be compared with
// (overhead_meter.h). Each block of steps has one. Its place in the block is drawn, so that it does
// not beat with the loop's own periods (an evaluation every 100 steps, say). The draw depends only
// on step numbers that all ranks agree on, so all ranks draw the same.
//
// The first blocks are short, so that a first result comes soon.
//
// Threads: one at a time (the engine's mutex). No call allocates. Errors: none.
#pragma once

#include <cstdint>
#include <limits>

namespace reft {

class ControlSteps {
 public:
  static constexpr int64_t kShortBlock = 8;   // steps
  static constexpr int64_t kShortBlocks = 6;  // from each beginning
  static constexpr int64_t kUndrawn = 64;     // steps of a block of which none is drawn

  // `every`: steps of a block. 0: none is drawn (steps without a copy of their own still count);
  // 1: every step is one.
  explicit ControlSteps(uint32_t every) : every_(every) {}

  // Blocks are counted anew from `step` on, short ones first. Before the first call no step is in a
  // block.
  void beginAt(int64_t step);
  // Multiplies the steps of all blocks but the short ones.
  void lengthen(uint32_t factor);

  // Whether the step that begins at that program point is a control step.
  bool drawn(int64_t step) const;
  // Numbers grow with the steps, and with each beginning; from 1 on, 0: none.
  uint64_t block(int64_t step) const;

 private:
  // Where a step lies: the block since the beginning, and the step in it.
  struct Place {
    int64_t block = 0;
    int64_t at = 0;
    int64_t steps = 1;  // of the block
  };
  Place placeOf(int64_t step) const;

  const uint32_t every_;
  uint32_t factor_ = 1;
  int64_t begin_ = std::numeric_limits<int64_t>::max();
  uint64_t beginnings_ = 0;
};

}  // namespace reft
