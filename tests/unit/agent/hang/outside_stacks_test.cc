#include "agent/hang/outside_stacks.h"

#include <chrono>
#include <thread>

#include <sys/eventfd.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft::agent {
namespace {

using ::testing::HasSubstr;

TEST(OutsideStacks, TellOfAnybodyWhoWasAskedFor) {
  OutsideStacks stacks;
  const int self = ::getpid();
  EXPECT_FALSE(stacks.asked(self));
  EXPECT_FALSE(stacks.of(self));
  EXPECT_TRUE(stacks.done());
  stacks.read({self, 0});
  stacks.read({self});
  EXPECT_TRUE(stacks.asked(self));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!stacks.done()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_THAT(stacks.of(self)->error, HasSubstr("is no CPython"));
  EXPECT_THAT(stacks.of(0)->error, HasSubstr("there is no process"));
}

TEST(OutsideStacks, WakeWhoWaitsForThem) {
  const UniqueFd wake(::eventfd(0, EFD_CLOEXEC));
  OutsideStacks stacks(wake.get());
  stacks.read({::getpid()});
  uint64_t times = 0;
  ASSERT_EQ(::read(wake.get(), &times, sizeof(times)), static_cast<ssize_t>(sizeof(times)));
  EXPECT_TRUE(stacks.done());
}

TEST(OutsideStacks, MayGoWhileTheyAreRead) {
  for (int i = 0; i < 20; ++i) {
    OutsideStacks stacks;
    stacks.read({::getpid()});
  }
}

}  // namespace
}  // namespace reft::agent
