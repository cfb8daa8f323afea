// How long the thread that trains may wait for outcomes.
//
// Without an agent no outcome ever comes, and training must not pay for each step: after one wait
// in vain, no other begins before the next outcome. Later waits in vain take at most a hundredth of
// the run, because ranks that do not count the same steps would wait for each other forever.
//
// Threads: one at a time (the engine's mutex). No clock inside. Errors: none.
#pragma once

#include <cstdint>

namespace reft {

class Patience {
 public:
  explicit Patience(int64_t now_ns) : started_ns_(now_ns) {}

  bool mayWait(int64_t now_ns) const {
    return !starved_ && waited_in_vain_ns_ <= (now_ns - started_ns_) / kRunPerVainWait;
  }
  void waitedInVain(int64_t ns) { waited_in_vain_ns_ += ns; }
  // Whether a point of the program lacked an outcome; no wait begins before the next one.
  void starve(bool starved) { starved_ = starved; }
  void outcome() { starved_ = false; }

 private:
  static constexpr int64_t kRunPerVainWait = 100;

  int64_t started_ns_;
  int64_t waited_in_vain_ns_ = 0;
  bool starved_ = false;
};

}  // namespace reft
