#include "agent/hang/turn.h"

#include <gtest/gtest.h>

namespace reft::agent {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kStart = 100 * kSecond;
using Act = Turn::Act;

TEST(Turn, IsTheFirstNodesAtOnce) {
  EXPECT_TRUE(Turn(0, 30 * kSecond).suspect(4, kStart));
  EXPECT_TRUE(Turn(3, 30 * kSecond).suspect(1, kStart));
  EXPECT_FALSE(Turn(3, 30 * kSecond).suspect(4, kStart));
}

TEST(Turn, OfAnotherComesAfterItHasAskedTheFirstInVain) {
  Turn turn(1, 30 * kSecond);
  EXPECT_EQ(turn.tick(kStart), Act::kNothing);
  EXPECT_FALSE(turn.suspect(2, kStart));
  EXPECT_EQ(turn.tick(kStart + kSecond), Act::kNothing);
  EXPECT_EQ(turn.tick(kStart + 2 * kSecond), Act::kPlease);
  EXPECT_EQ(turn.tick(kStart + 3 * kSecond), Act::kNothing);
  EXPECT_EQ(turn.tick(kStart + 7 * kSecond), Act::kLook);
  EXPECT_EQ(turn.tick(kStart + 8 * kSecond), Act::kNothing);  // once
}

TEST(Turn, DoesNotComeWhileALowerNodeHasItInHand) {
  Turn turn(2, 40 * kSecond);
  turn.suspect(4, kStart);
  turn.heldBy(3, kStart + kSecond);  // not a lower one
  EXPECT_EQ(turn.tick(kStart + 3 * kSecond), Act::kPlease);
  turn.heldBy(1, kStart + 4 * kSecond);
  EXPECT_EQ(turn.tick(kStart + 20 * kSecond), Act::kNothing);
  turn.suspect(4, kStart + 20 * kSecond);
  EXPECT_EQ(turn.tick(kStart + 30 * kSecond), Act::kNothing);
  // Nobody has said so for long.
  turn.suspect(4, kStart + 40 * kSecond);
  EXPECT_EQ(turn.tick(kStart + 43 * kSecond), Act::kPlease);
  EXPECT_LT(turn.holdNs(), 30 * kSecond);
}

TEST(Turn, OfNodesComesOneAfterTheOther) {
  Turn second(1, 30 * kSecond), third(2, 30 * kSecond), last(1000, 30 * kSecond);
  for (Turn* turn : {&second, &third, &last}) {
    turn->suspect(1001, kStart);
  }
  EXPECT_EQ(second.tick(kStart + 1600'000'000), Act::kPlease);
  EXPECT_EQ(third.tick(kStart + 1600'000'000), Act::kNothing);
  EXPECT_EQ(third.tick(kStart + 2100'000'000), Act::kPlease);
  EXPECT_EQ(last.tick(kStart + 5 * kSecond), Act::kNothing);
  EXPECT_EQ(last.tick(kStart + 6 * kSecond), Act::kPlease);
}

TEST(Turn, IsOverWhenTheRanksGoOn) {
  Turn turn(1, 30 * kSecond);
  turn.suspect(2, kStart);
  turn.progress();
  EXPECT_EQ(turn.tick(kStart + 60 * kSecond), Act::kNothing);
}

}  // namespace
}  // namespace reft::agent
