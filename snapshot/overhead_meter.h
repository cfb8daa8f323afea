// What snapshots cost training, measured: steps that ran beside the copy of a snapshot against steps that ran without one.
//
// With a snapshot at every step there is nothing to compare with, so now and then one is a *control step*: its snapshot is
// copied before the step begins, and the time of that is not counted into the step. No snapshot is left out for it. The place
// of the control step in each block of steps is drawn, so that it does not beat with the loop's own periods (an evaluation
// every 100 steps, say); the draw depends on nothing but the number of the step, so all ranks draw the same.
//
// A block yields one number: the median step beside a copy over the median step without. The overhead is the median over the
// newest blocks, so that neither a slow drift of the step time nor single odd steps matter; its noise is twice the standard
// error of that median, robustly (median absolute deviation). Short blocks at first, so that something is known soon.
//
// No clock inside. Threads: one at a time (the training thread). Memory is fixed: no call allocates. O(1), but at the end of a
// block, which is O(kSamples). Errors: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace reft {

struct Overhead {
  bool known = false;
  // Of a step with a snapshot, in millionths of one without. May be less than 0: noise.
  int64_t ppm = 0;
  int64_t noise_ppm = 0;
  int64_t step_ns = 0;  // median of the newest block, without a copy
};

class OverheadMeter {
 public:
  static constexpr size_t kSamples = 64;       // newest steps of each kind that a block keeps
  static constexpr size_t kBlocks = 16;        // newest blocks that count
  static constexpr size_t kFewestBlocks = 5;   // before anything is said
  static constexpr uint32_t kShortBlock = 8;   // steps
  static constexpr uint64_t kWarmUpSteps = 3;  // not measured: memory is touched for the first time

  // `control_every`: steps of a block. 0: nothing is drawn (what runs without a copy by itself still counts); 1: every step is one.
  explicit OverheadMeter(uint32_t control_every);

  // Whether the step that begins now is to be a control step.
  bool drawn() const;
  // The step that began at the newest drawn() has ended and took `step_ns`. Ends the turn: drawn() speaks of the next one.
  void step(int64_t step_ns, bool beside_copy);
  // The step has ended and says nothing: no time of it is known.
  void skip();
  // Measures anew: snapshots come at another rate now. What was known stays known until there is something newer.
  void restart();

  const Overhead& overhead() const { return overhead_; }
  // Grows when overhead() may have changed.
  uint64_t blocks() const { return blocks_ended_; }

 private:
  // The newest values of one kind in the running block.
  struct Samples {
    std::array<int64_t, kSamples> values{};
    size_t count = 0;  // ever added; the ring holds the newest
    void add(int64_t value) { values[count++ % kSamples] = value; }
    size_t size() const { return count < kSamples ? count : kSamples; }
    int64_t median();  // reorders; not empty
  };

  uint32_t blockSteps() const;
  void turn();
  void endBlock();

  const uint32_t control_every_;
  uint64_t draws_ = 0;  // blocks begun since the start, for the draw
  uint32_t at_ = 0;     // step within the block
  uint32_t drawn_at_ = 0;
  uint64_t warm_up_left_ = kWarmUpSteps;
  Samples with_, without_;
  std::array<int64_t, kBlocks> differences_{};  // ppm
  size_t difference_count_ = 0;                 // since restart()
  uint64_t blocks_ended_ = 0;
  Overhead overhead_;
};

}  // namespace reft
