#include "snapshot/cost/overhead_meter.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace reft {

namespace {

constexpr double kMillion = 1e6;
constexpr double kSigmaPerDeviation =
    1.48;  // of a normal distribution, from its median absolute deviation
constexpr double kMedianPerMean = 1.25;  // standard error of a median, in those of a mean
constexpr double kSure = 2;              // standard errors

template <size_t N>
int64_t medianOf(std::array<int64_t, N>& values, size_t count) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(count / 2);
  std::nth_element(values.begin(), middle, values.begin() + static_cast<std::ptrdiff_t>(count));
  return *middle;
}

}  // namespace

int64_t OverheadMeter::Samples::median() {
  return medianOf(values, size());
}

void OverheadMeter::step(uint64_t block, int64_t step_ns, bool beside_copy) {
  if (block < block_ || block == 0 || step_ns <= 0) {
    return;
  }
  if (block != block_ && with_.count > 0 && without_.count > 0) {
    endBlock();
  }
  block_ = block;
  (beside_copy ? with_ : without_).add(step_ns);
}

void OverheadMeter::endBlock() {
  const int64_t without = without_.median();
  const double difference =
      static_cast<double>(with_.median() - without) * kMillion / static_cast<double>(without);
  differences_[difference_count_++ % kBlocks] = static_cast<int64_t>(difference);
  with_.count = without_.count = 0;
  ++blocks_ended_;
  overhead_.step_ns = without;
  if (difference_count_ < kFewestBlocks) {
    return;
  }
  const size_t count = std::min(difference_count_, kBlocks);
  auto values = differences_;
  overhead_.ppm = medianOf(values, count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = std::abs(differences_[i] - overhead_.ppm);
  }
  const double deviation = static_cast<double>(medianOf(values, count));
  overhead_.noise_ppm = static_cast<int64_t>(kSure * kSigmaPerDeviation * kMedianPerMean *
                                             deviation / std::sqrt(static_cast<double>(count)));
  overhead_.known = true;
}

void OverheadMeter::restart(uint64_t block) {
  block_ = block;
  difference_count_ = 0;
  with_.count = without_.count = 0;
}

void OverheadMeter::forget() {
  restart(0);
  overhead_ = {};
  ++blocks_ended_;
}

}  // namespace reft
