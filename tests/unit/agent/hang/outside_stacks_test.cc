#include "agent/hang/outside_stacks.h"

#include <chrono>
#include <map>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft::agent {
namespace outside_stacks_test {

using ::testing::HasSubstr;

// Waits until there are `count` results.
std::vector<OutsideStacks::Result> resultsOf(OutsideStacks& stacks, int wake, size_t count) {
  std::vector<OutsideStacks::Result> results;
  while (results.size() < count) {
    pollfd ready{wake, POLLIN, 0};
    if (::poll(&ready, 1, 60'000) <= 0) {
      ADD_FAILURE() << results.size() << " results within 60 s";
      break;
    }
    uint64_t times = 0;
    EXPECT_EQ(::read(wake, &times, sizeof(times)), static_cast<ssize_t>(sizeof(times)));
    for (auto& result : stacks.finished()) {
      results.push_back(std::move(result));
    }
  }
  return results;
}

TEST(OutsideStacks, GiveAResultForEachProcessAndWakeTheLoop) {
  const UniqueFd wake(::eventfd(0, EFD_CLOEXEC));
  OutsideStacks stacks(wake.get());
  EXPECT_TRUE(stacks.finished().empty());
  const int self = ::getpid();
  stacks.read(7, {self, 0});
  std::map<int, OutsideStacks::Result> by_pid;
  for (auto& result : resultsOf(stacks, wake.get(), 2)) {
    EXPECT_EQ(result.look, 7U);
    by_pid.emplace(result.pid, std::move(result));
  }
  ASSERT_EQ(by_pid.size(), 2U);
  EXPECT_THAT(by_pid[self].stacks.error, HasSubstr("is no CPython"));
  EXPECT_THAT(by_pid[0].stacks.error, HasSubstr("there is no process"));
  EXPECT_TRUE(stacks.finished().empty());  // once each
}

TEST(OutsideStacks, WakeTheLoopAfterTheyAreGone) {
  const UniqueFd wake(::eventfd(0, EFD_CLOEXEC));
  constexpr uint64_t kReads = 20;
  for (uint64_t i = 0; i < kReads; ++i) {
    OutsideStacks stacks(wake.get());
    stacks.read(i, {::getpid()});
  }
  uint64_t woken = 0;
  while (woken < kReads) {
    pollfd ready{wake.get(), POLLIN, 0};
    ASSERT_GT(::poll(&ready, 1, 60'000), 0) << woken << " reads ended within 60 s";
    uint64_t times = 0;
    ASSERT_EQ(::read(wake.get(), &times, sizeof(times)), static_cast<ssize_t>(sizeof(times)));
    woken += times;
  }
}

}  // namespace outside_stacks_test
}  // namespace reft::agent
