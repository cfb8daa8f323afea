// Measures what snapshots cost training: steps that ran beside the copy of a snapshot against steps
// that ran without one.
//
// With a snapshot at every step there is nothing to compare with, so now and then one is a *control
// step* (control_steps.h): its snapshot is copied before the step begins (on a device: at its end),
// and that time is not counted into the step. No snapshot is left out for it.
//
// A block of steps yields one number: the median step beside a copy over the median step without.
// The overhead is the median over the newest blocks, so that neither a slow drift of the step time
// nor single odd steps matter. Its noise is twice the standard error of that median, estimated
// robustly (median absolute deviation).
//
// No clock inside. Threads: one at a time (the engine's mutex). Memory is fixed: no call allocates.
// O(1), except for the first step of a block, which is O(kSamples). Errors: none.
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
  static constexpr size_t kSamples = 64;      // newest steps of each kind that a block keeps
  static constexpr size_t kBlocks = 16;       // newest blocks that count
  static constexpr size_t kFewestBlocks = 5;  // before a result is known

  // A step of `block` took `step_ns`. Blocks must not decrease; 0: it is not measured. A block is
  // over when a step of another one comes; one without both kinds of steps is continued by the
  // next.
  void step(uint64_t block, int64_t step_ns, bool beside_copy);
  // Measures anew from `block` on. The old result stays until there is a newer one.
  void restart(uint64_t block);
  // Ends the measurement and discards its result.
  void forget();

  const Overhead& overhead() const { return overhead_; }
  // Whether overhead() is of what has been measured since restart().
  bool isCurrent() const { return difference_count_ >= kFewestBlocks; }
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

  void endBlock();

  uint64_t block_ = 1;
  Samples with_, without_;
  std::array<int64_t, kBlocks> differences_{};  // ppm
  size_t difference_count_ = 0;                 // since restart()
  uint64_t blocks_ended_ = 0;
  Overhead overhead_;
};

}  // namespace reft
