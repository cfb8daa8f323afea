// How many log lines strangers may cause: a bucket of tokens, filled at each tick of the agent.
//
// Threads: one at a time. Errors: none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace reft::agent {

class LineBudget {
 public:
  static constexpr int kMost = 100;
  static constexpr int kPerTick = 1;

  // Whether a line may be written now.
  bool take() {
    if (tokens_ == 0) {
      ++left_out_;
      return false;
    }
    --tokens_;
    return true;
  }
  // Returns how many lines were left out since the last call that returned some; they are worth a
  // line of their own as soon as there is a token for it.
  uint64_t refill() {
    tokens_ = std::min(kMost, tokens_ + kPerTick);
    if (left_out_ == 0 || tokens_ < kMost / 2) {
      return 0;
    }
    return std::exchange(left_out_, 0);
  }

 private:
  int tokens_ = kMost;
  uint64_t left_out_ = 0;
};

}  // namespace reft::agent
