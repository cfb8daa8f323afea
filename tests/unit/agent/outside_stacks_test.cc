#include "agent/outside_stacks.h"

#include <chrono>
#include <thread>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft::agent {
namespace {

using ::testing::HasSubstr;

TEST(OutsideStacks, TellOfAnybodyWhoWasAskedForOnce) {
  OutsideStacks stacks;
  EXPECT_FALSE(stacks.asked(0));
  EXPECT_FALSE(stacks.of(0));
  stacks.read(0, ::getpid());
  stacks.read(0, 0);  // once for a rank
  stacks.read(1, 0);
  EXPECT_TRUE(stacks.asked(0));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!(stacks.of(0) && stacks.of(1))) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_THAT(stacks.of(0)->error, HasSubstr("is no CPython"));
  EXPECT_THAT(stacks.of(1)->error, HasSubstr("there is no process"));
}

TEST(OutsideStacks, MayGoWhileTheyAreRead) {
  for (int i = 0; i < 20; ++i) {
    OutsideStacks stacks;
    stacks.read(i, ::getpid());
  }
}

}  // namespace
}  // namespace reft::agent
