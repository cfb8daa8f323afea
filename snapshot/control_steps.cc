#include "snapshot/control_steps.h"

#include <algorithm>

namespace reft {

namespace {

// splitmix64
uint64_t scrambled(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

}  // namespace

ControlSteps::ControlSteps(uint32_t every) : every_(every) {
  draw();
}

uint64_t ControlSteps::blockSteps() const {
  const uint64_t steps = every_ == 0 ? kUndrawn : uint64_t{every_} * factor_;
  return short_left_ > 0 && every_ != 1 ? std::min<uint64_t>(steps, kShortBlock) : steps;
}

void ControlSteps::draw() {
  at_ = 0;
  drawn_at_ = scrambled(block_) % blockSteps();
}

bool ControlSteps::drawn() const {
  return every_ != 0 && warm_up_left_ == 0 && (every_ == 1 || at_ == drawn_at_);
}

void ControlSteps::turn() {
  if (warm_up_left_ > 0) {
    --warm_up_left_;
    return;
  }
  if (++at_ < blockSteps()) {
    return;
  }
  ++block_;
  short_left_ -= short_left_ > 0 ? 1 : 0;
  draw();
}

void ControlSteps::restart() {
  ++block_;
  short_left_ = kShortBlocks;
  draw();
}

}  // namespace reft
