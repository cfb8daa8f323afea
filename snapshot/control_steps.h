// Which steps are control steps: steps that run with no copy beside them, so that there is something to compare the others with
// (overhead_meter.h). One in each block of steps; its place in the block is drawn, so that it does not beat with the loop's own periods
// (an evaluation every 100 steps, say). The draw depends on nothing but how many steps there were, so all ranks draw the same.
//
// The first blocks are short, so that something is known soon.
//
// Threads: one at a time (the training thread). No call allocates. Errors: none.
#pragma once

#include <cstdint>

namespace reft {

class ControlSteps {
 public:
  static constexpr uint32_t kShortBlock = 8;   // steps
  static constexpr uint32_t kShortBlocks = 6;  // at the start, and after each restart()
  static constexpr uint64_t kWarmUpSteps = 3;  // in no block: memory is touched for the first time
  static constexpr uint32_t kUndrawn = 64;     // steps of a block of which none is drawn

  // `every`: steps of a block. 0: nothing is drawn (what runs without a copy by itself still counts); 1: every step is one.
  explicit ControlSteps(uint32_t every);

  // Of the step that begins now.
  bool drawn() const;
  uint64_t block() const { return warm_up_left_ == 0 ? block_ : 0; }  // from 1 on; 0: none
  // The step has ended.
  void turn();
  // Short blocks again: other things are compared from now on.
  void restart();
  // Blocks have so many times as many steps from now on, but for the short ones.
  void lengthen(uint32_t factor) { factor_ = factor; }

 private:
  uint64_t blockSteps() const;
  void draw();

  const uint32_t every_;
  uint32_t factor_ = 1;
  uint64_t warm_up_left_ = kWarmUpSteps;
  uint64_t block_ = 1;
  uint32_t short_left_ = kShortBlocks;
  uint64_t at_ = 0;  // step within the block
  uint64_t drawn_at_ = 0;
};

}  // namespace reft
