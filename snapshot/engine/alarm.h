// Whether training runs without protection: ops go on, and no snapshot is committed for too long.
//
// An idle job loses nothing, so only ops that progress without a commit raise the alarm. Once
// raised, it stays until the next commit.
//
// Threads: one at a time (the engine's mutex). No clock inside. Errors: none.
#pragma once

#include <chrono>
#include <cstdint>

namespace reft {

class Alarm {
 public:
  // `limit`: longest time without a commit.
  Alarm(std::chrono::nanoseconds limit, int64_t now_ns)
      : limit_ns_(limit.count()), protected_ns_(now_ns) {}

  bool unprotected() const { return unprotected_; }

  // The program point of `step`. The first one follows the state that this process began with.
  void point(int64_t step, int64_t now_ns);
  void committed(int64_t step, int64_t now_ns);

  // Whether training is unprotected. `ops`: begun so far; `every`: steps from one snapshot to the
  // next.
  bool check(int64_t now_ns, uint64_t ops, uint64_t every);

 private:
  int64_t limit_ns_;
  int64_t protected_ns_;        // newest commit, or the start
  int64_t protected_step_ = 0;  // newest commit, or what this process began with
  int64_t step_ = 0;            // newest program point
  int64_t step_ns_ = 0;
  bool stepped_ = false;
  uint64_t ops_ = 0;  // at the newest check
  bool unprotected_ = false;
};

}  // namespace reft
