// Which steps are control steps: steps that run with no copy beside them, so that there is
// something to compare the others with (overhead_meter.h). One in each block of steps; its place in
// the block is drawn, so that it does not beat with the loop's own periods (an evaluation every 100
// steps, say). The draw depends on nothing but numbers of steps that all ranks agree on, so all
// draw the same.
//
// The first blocks are short, so that something is known soon.
//
// Threads: one at a time (the training thread). No call allocates. Errors: none.
#pragma once

#include <cstdint>
#include <limits>

namespace reft {

class ControlSteps {
 public:
  static constexpr int64_t kShortBlock = 8;   // steps
  static constexpr int64_t kShortBlocks = 6;  // from each beginning
  static constexpr int64_t kUndrawn = 64;     // steps of a block of which none is drawn

  // `every`: steps of a block. 0: nothing is drawn (what runs without a copy by itself still
  // counts); 1: every step is one.
  explicit ControlSteps(uint32_t every) : every_(every) {}

  // Blocks are counted from `step` on, short ones first: other things are compared from there on.
  // Before the first call there is none.
  void beginAt(int64_t step);
  // Blocks have so many times as many steps from now on, but for the short ones.
  void lengthen(uint32_t factor);

  // Of the step that begins at that program point.
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
