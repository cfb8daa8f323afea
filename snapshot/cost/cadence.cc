#include "snapshot/cost/cadence.h"

#include <algorithm>

namespace reft {

namespace {

// Frequent again only well below the limit, so that the interval does not swing.
constexpr double kWellBelow = 0.6;

}  // namespace

bool Cadence::isMultiple(int64_t step, uint8_t doublings) const {
  return step % static_cast<int64_t>(uint64_t{options_.base} << doublings) == 0;
}

bool Cadence::decidesAt(int64_t step) const {
  return options_.limit_ppm > 0 && step >= undecided_from_ && isMultiple(step, 0);
}

Cadence::Answer Cadence::ask(int64_t step, bool outcomes_known) {
  if (options_.limit_ppm <= 0) {
    return isMultiple(step, 0) ? Answer::kTake : Answer::kLeave;
  }
  if (!decidesAt(step)) {
    return Answer::kLeave;
  }
  if (!outcomes_known) {
    return isMultiple(step, kMostDoublings) ? Answer::kTake : Answer::kVoteAgainst;
  }
  if (doublings_ != agreed_) {
    doublings_ = agreed_;
    since_ = agreed_since_;
  }
  const auto every = static_cast<int64_t>(this->every());
  // Who was in doubt at a step of every interval does not know by which one the others took it: all
  // decide anew right after.
  undecided_from_ =
      isMultiple(step, kMostDoublings) ? step + options_.base : (step / every + 1) * every;
  return isMultiple(step, doublings_) ? Answer::kTake : Answer::kLeave;
}

void Cadence::committed(int64_t step, uint8_t proposal) {
  if (options_.limit_ppm > 0 && step > agreed_at_ && proposal >= 1 && proposal <= kMostProposal) {
    agreed_at_ = step;
    if (agreed_ != proposal - 1) {
      agreed_ = static_cast<uint8_t>(proposal - 1);
      agreed_since_ = step;
    }
  }
}

uint8_t Cadence::proposal() const {
  return options_.limit_ppm > 0 && options_.decides ? static_cast<uint8_t>(wanted_ + 1) : 0;
}

// The fewest doublings with which a snapshot that costs a step `ppm` costs training no more than
// the limit.
uint8_t Cadence::least(int64_t ppm, double limit_ppm) const {
  uint8_t doublings = 0;
  while (doublings<kMostDoublings&& static_cast<double>(ppm) /
                   static_cast<double>(uint64_t{1} << doublings)>
             limit_ppm) {
    ++doublings;
  }
  return doublings;
}

void Cadence::learn(const Overhead& overhead, bool is_current) {
  // What was measured under another interval than the proposed one says nothing about that yet.
  if (!overhead.known || options_.limit_ppm <= 0 || wanted_ != doublings_) {
    return;
  }
  const auto limit = static_cast<double>(options_.limit_ppm);
  const auto share = static_cast<double>(uint64_t{1} << doublings_);
  uint8_t wanted = doublings_;
  const bool exceeds = static_cast<double>(overhead.ppm - overhead.noise_ppm) / share > limit;
  if (exceeds) {
    wanted = std::max(least(overhead.ppm, limit), doublings_);
  } else {
    wanted = std::min(least(overhead.ppm, limit * kWellBelow), doublings_);
  }
  while (wanted > 0 && overhead.step_ns > 0 &&
         options_.longest_ns / overhead.step_ns <
             static_cast<int64_t>(uint64_t{options_.base} << wanted)) {
    --wanted;
  }
  exceeds_ = exceeds && is_current && wanted <= doublings_;
  wanted_ = wanted;
}

}  // namespace reft
