#include "snapshot/cost/control_steps.h"

#include <algorithm>

#include "intercept/base/hash.h"

namespace reft {

namespace {

constexpr int kBlockBits = 40;  // of a block's number, below that of its beginning

}  // namespace

void ControlSteps::beginAt(int64_t step) {
  begin_ = step;
  ++beginnings_;
}

void ControlSteps::lengthen(uint32_t factor) {
  beginnings_ += factor != factor_ ? 1 : 0;  // the numbers of blocks shall not go back
  factor_ = factor;
}

ControlSteps::Place ControlSteps::placeOf(int64_t step) const {
  const int64_t since = step - begin_;
  const int64_t steps = every_ == 0 ? kUndrawn : int64_t{every_} * factor_;
  const int64_t few = std::min(steps, kShortBlock);
  if (since < few * kShortBlocks) {
    return {since / few, since % few, few};
  }
  const int64_t later = since - few * kShortBlocks;
  return {kShortBlocks + later / steps, later % steps, steps};
}

bool ControlSteps::drawn(int64_t step) const {
  if (every_ == 0 || step < begin_) {
    return false;
  }
  const Place place = placeOf(step);
  const auto draw = splitmix64(static_cast<uint64_t>(begin_) * 0x100000001B3ull +
                               static_cast<uint64_t>(place.block));
  return every_ == 1 || place.at == static_cast<int64_t>(draw % static_cast<uint64_t>(place.steps));
}

uint64_t ControlSteps::block(int64_t step) const {
  return step < begin_
             ? 0
             : (beginnings_ << kBlockBits) + static_cast<uint64_t>(placeOf(step).block) + 1;
}

}  // namespace reft
