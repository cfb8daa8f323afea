// A clock for tests of the whole agent: CLOCK_MONOTONIC plus the nanoseconds (int64) in a file of
// at least eight bytes, which the test maps and advances. Steps of the agent's timer stay real.
//
// Threads: nowNs() is thread-safe. Errors: the constructor throws SystemError.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <string>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class TestClock final : public Clock {
 public:
  explicit TestClock(const std::string& path) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    void* page = file ? ::mmap(nullptr, sizeof(*ahead_ns_), PROT_READ, MAP_SHARED, file.get(), 0)
                      : MAP_FAILED;
    if (page == MAP_FAILED) {
      throw SystemError("cannot map the test clock " + path);
    }
    ahead_ns_ = static_cast<const std::atomic<int64_t>*>(page);
  }
  int64_t nowNs() const override {
    return SteadyClock::instance().nowNs() + ahead_ns_->load(std::memory_order_relaxed);
  }

 private:
  const std::atomic<int64_t>* ahead_ns_ = nullptr;
};

}  // namespace reft::agent
