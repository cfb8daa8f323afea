// At which points of the program a rank takes snapshots again after points without a slot.
//
// A slot is in use until the job has decided about its step; with copies on another node and a slow
// network, that takes many steps. The outcome reaches each rank at another point of the program. If
// each took the next one, ranks would seal different steps, and the job would commit none, over and
// over. So a rank waits for a point whose number is a multiple of a power of two: at least 1.5
// times the points that it has missed, at most kFarthest. Ranks that have missed about as many meet
// there. One that waits for a greater multiple meets the others at that one: they are free again by
// then.
//
// Threads: one at a time (the engine's mutex). No clock inside. Errors: none.
#pragma once

#include <cstdint>

namespace reft {

class MeetingPoints {
 public:
  static constexpr int64_t kFarthest = 64;

  // A point had no slot.
  void missed() { ++missed_; }
  // A snapshot has begun.
  void took() { missed_ = 0; }
  // Whether a snapshot may begin at this point; points count those that are due.
  bool isOne(int64_t point) const { return point % apart() == 0; }

 private:
  int64_t apart() const {
    int64_t apart = 1;
    while (apart * 2 < missed_ * 3 && apart < kFarthest) {
      apart *= 2;
    }
    return apart;
  }

  int64_t missed_ = 0;  // since the last snapshot
};

}  // namespace reft
