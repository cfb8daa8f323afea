#include "snapshot/control_steps.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace reft {
namespace {

TEST(ControlSteps, OneInEachBlockAndNotAlwaysTheSameOne) {
  ControlSteps steps(16);
  std::set<uint64_t> places;
  std::vector<int> controls(60, 0);
  std::vector<uint64_t> seen(60, 0);
  for (int i = 0; i < 16 * 40; ++i) {
    const uint64_t block = steps.block();
    ASSERT_LT(block, controls.size());
    if (steps.drawn()) {
      ++controls[block];
      places.insert(seen[block]);
    }
    ++seen[block];
    steps.turn();
  }
  EXPECT_EQ(controls[0], 0) << "the warm-up";
  EXPECT_EQ(seen[0], ControlSteps::kWarmUpSteps);
  for (uint64_t block = 1; block < steps.block(); ++block) {
    EXPECT_EQ(controls[block], 1) << block;
    EXPECT_EQ(seen[block], block <= ControlSteps::kShortBlocks ? ControlSteps::kShortBlock : 16u) << block;
  }
  EXPECT_GT(places.size(), 8u);
}

TEST(ControlSteps, AllRanksDrawTheSame) {
  ControlSteps a(32);
  ControlSteps b(32);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(a.drawn(), b.drawn()) << i;
    ASSERT_EQ(a.block(), b.block()) << i;
    if (i == 300) {
      a.restart();
      b.restart();
    }
    a.turn();
    b.turn();
  }
}

TEST(ControlSteps, NoneAndAll) {
  ControlSteps none(0);
  ControlSteps all(1);
  int drawn = 0;
  for (int i = 0; i < 503; ++i) {
    EXPECT_FALSE(none.drawn());
    drawn += all.drawn() ? 1 : 0;
    none.turn();
    all.turn();
  }
  EXPECT_EQ(drawn, 500) << "all but the warm-up";
}

TEST(ControlSteps, LongBlocksAreMadeLongerShortOnesAreNot) {
  ControlSteps steps(16);
  steps.lengthen(8);
  int drawn = 0;
  for (int i = 0; i < 3 + 6 * 8; ++i) {
    drawn += steps.drawn() ? 1 : 0;
    steps.turn();
  }
  EXPECT_EQ(drawn, 6);
  for (int i = 0; i < 128 * 3; ++i) {
    drawn += steps.drawn() ? 1 : 0;
    steps.turn();
  }
  EXPECT_EQ(drawn, 9);
}

TEST(ControlSteps, ARestartBeginsAnotherBlockWithShortOnes) {
  ControlSteps steps(64);
  for (int i = 0; i < 500; ++i) {
    steps.turn();
  }
  const uint64_t before = steps.block();
  steps.restart();
  EXPECT_EQ(steps.block(), before + 1);
  for (uint32_t i = 0; i < ControlSteps::kShortBlock; ++i) {
    EXPECT_EQ(steps.block(), before + 1);
    steps.turn();
  }
  EXPECT_EQ(steps.block(), before + 2);
}

}  // namespace
}  // namespace reft
