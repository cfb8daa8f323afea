// Time as an argument: code that waits or measures takes a Clock, so that tests never sleep.
//
// Threads: all methods are thread-safe. Errors: none.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace reft {

inline constexpr int64_t kSecond = 1'000'000'000;  // in nanoseconds, as all times are

class Clock {
 public:
  virtual ~Clock() = default;
  // CLOCK_MONOTONIC in nanoseconds: comparable between the processes of one host.
  virtual int64_t nowNs() const = 0;
};

class SteadyClock final : public Clock {
 public:
  int64_t nowNs() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static const SteadyClock& instance() {
    static const SteadyClock clock;
    return clock;
  }
};

// Stands still until a test moves it.
class ManualClock final : public Clock {
 public:
  int64_t nowNs() const override { return now_.load(); }
  void advance(std::chrono::nanoseconds by) { now_ += by.count(); }

 private:
  std::atomic<int64_t> now_{1};
};

}  // namespace reft
