#include "snapshot/cost/control_steps.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace reft {
namespace control_steps_test {

struct Block {
  int64_t steps = 0;
  int drawn = 0;
};

std::map<uint64_t, Block> blocksOf(const ControlSteps& control, int64_t from, int64_t to) {
  std::map<uint64_t, Block> blocks;
  for (int64_t step = from; step < to; ++step) {
    Block& block = blocks[control.block(step)];
    ++block.steps;
    block.drawn += control.drawn(step) ? 1 : 0;
  }
  return blocks;
}

TEST(ControlSteps, OneInEachBlockAndNotAlwaysTheSameOne) {
  ControlSteps control(16);
  EXPECT_EQ(control.block(1000), 0u) << "there is no beginning yet";
  EXPECT_FALSE(control.drawn(1000));
  control.beginAt(3);
  const auto blocks = blocksOf(control, 0, 3 + 6 * 8 + 16 * 40);
  EXPECT_EQ(blocks.at(0).steps, 3);
  EXPECT_EQ(blocks.at(0).drawn, 0);
  int number = 0;
  for (const auto& [id, block] : blocks) {
    if (id != 0) {
      EXPECT_EQ(block.steps, number < ControlSteps::kShortBlocks ? ControlSteps::kShortBlock : 16)
          << number;
      EXPECT_EQ(block.drawn, 1) << number;
      ++number;
    }
  }
  EXPECT_EQ(number, 46);
  std::set<int64_t> places;
  for (int64_t step = 3 + 6 * 8; step < 3 + 6 * 8 + 16 * 40; ++step) {
    if (control.drawn(step)) {
      places.insert((step - 3) % 16);
    }
  }
  EXPECT_GT(places.size(), 8u);
}

// Whoever heard late of something, or did not exist before, draws as the others do.
TEST(ControlSteps, TheDrawDependsOnNumbersOfStepsAlone) {
  ControlSteps a(32);
  ControlSteps b(32);
  a.beginAt(3);
  a.beginAt(500);
  b.beginAt(120);
  b.beginAt(300);
  b.beginAt(500);
  for (int64_t step = 500; step < 3000; ++step) {
    ASSERT_EQ(a.drawn(step), b.drawn(step)) << step;
  }
}

TEST(ControlSteps, NoneAndAll) {
  ControlSteps none(0);
  ControlSteps all(1);
  none.beginAt(3);
  all.beginAt(3);
  int drawn = 0;
  for (int64_t step = 0; step < 503; ++step) {
    EXPECT_FALSE(none.drawn(step));
    drawn += all.drawn(step) ? 1 : 0;
  }
  EXPECT_EQ(drawn, 500) << "all but the warm-up";
  EXPECT_NE(none.block(3), none.block(503)) << "steps without a snapshot have their blocks, too";
}

TEST(ControlSteps, LongBlocksAreMadeLongerShortOnesAreNot) {
  ControlSteps control(16);
  control.beginAt(0);
  control.lengthen(8);
  int drawn = 0;
  for (int64_t step = 0; step < 6 * 8 + 128 * 3; ++step) {
    drawn += control.drawn(step) ? 1 : 0;
    if (step == 6 * 8 - 1) {
      EXPECT_EQ(drawn, 6);
    }
  }
  EXPECT_EQ(drawn, 9);
}

TEST(ControlSteps, BlocksNeverHaveSmallerNumbersThanBefore) {
  ControlSteps control(16);
  control.beginAt(0);
  uint64_t before = 0;
  for (int64_t step = 0; step < 2000; ++step) {
    if (step == 700) {
      control.lengthen(8);
    } else if (step == 1500) {
      control.beginAt(1490);
    }
    ASSERT_GE(control.block(step), before) << step;
    before = control.block(step);
  }
}

}  // namespace control_steps_test
}  // namespace reft
