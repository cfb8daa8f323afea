#include "agent/hang/leader.h"

#include <gtest/gtest.h>

#include "intercept/base/clock.h"

namespace reft::agent {
namespace leader_test {

constexpr int64_t kStart = 100 * kSecond;
using Act = Leader::Act;

TEST(Leader, IsTheFirstNodeAtOnce) {
  EXPECT_TRUE(Leader(0, 30 * kSecond).suspect(4, kStart));
  EXPECT_TRUE(Leader(3, 30 * kSecond).suspect(1, kStart));
  EXPECT_FALSE(Leader(3, 30 * kSecond).suspect(4, kStart));
}

TEST(Leader, IsAnotherNodeAfterItAskedTheFirstInVain) {
  Leader leader(1, 30 * kSecond);
  EXPECT_EQ(leader.tick(kStart), Act::kNothing);
  EXPECT_FALSE(leader.suspect(2, kStart));
  EXPECT_EQ(leader.tick(kStart + kSecond), Act::kNothing);
  EXPECT_EQ(leader.tick(kStart + 2 * kSecond), Act::kAskFirst);
  EXPECT_EQ(leader.tick(kStart + 3 * kSecond), Act::kNothing);
  EXPECT_EQ(leader.tick(kStart + 7 * kSecond), Act::kLead);
  EXPECT_EQ(leader.tick(kStart + 8 * kSecond), Act::kNothing);  // once
}

TEST(Leader, IsNoNodeAboveOneThatLeads) {
  Leader leader(2, 40 * kSecond);
  leader.suspect(4, kStart);
  leader.ledBy(3, kStart + kSecond);  // not a lower one
  EXPECT_EQ(leader.tick(kStart + 3 * kSecond), Act::kAskFirst);
  leader.ledBy(1, kStart + 4 * kSecond);
  EXPECT_EQ(leader.tick(kStart + 20 * kSecond), Act::kNothing);
  leader.suspect(4, kStart + 20 * kSecond);
  EXPECT_EQ(leader.tick(kStart + 30 * kSecond), Act::kNothing);
  // The last announcement is too old.
  leader.suspect(4, kStart + 40 * kSecond);
  EXPECT_EQ(leader.tick(kStart + 43 * kSecond), Act::kAskFirst);
  EXPECT_LT(leader.announceNs(), 30 * kSecond);
}

TEST(Leader, IsOneNodeAfterTheOther) {
  Leader second(1, 30 * kSecond), third(2, 30 * kSecond), last(1000, 30 * kSecond);
  for (Leader* leader : {&second, &third, &last}) {
    leader->suspect(1001, kStart);
  }
  EXPECT_EQ(second.tick(kStart + 1600'000'000), Act::kAskFirst);
  EXPECT_EQ(third.tick(kStart + 1600'000'000), Act::kNothing);
  EXPECT_EQ(third.tick(kStart + 2100'000'000), Act::kAskFirst);
  EXPECT_EQ(last.tick(kStart + 5 * kSecond), Act::kNothing);
  EXPECT_EQ(last.tick(kStart + 6 * kSecond), Act::kAskFirst);
}

TEST(Leader, IsNobodyWhenTheRanksMakeProgress) {
  Leader leader(1, 30 * kSecond);
  leader.suspect(2, kStart);
  leader.progress();
  EXPECT_EQ(leader.tick(kStart + 60 * kSecond), Act::kNothing);
}

}  // namespace leader_test
}  // namespace reft::agent
