#include "agent/peers/admission.h"

#include <gtest/gtest.h>

#include "agent/peers/line_budget.h"

namespace reft::agent {

namespace admission_test {

TEST(Admission, NobodyLeavesWhileThereIsRoom) {
  EXPECT_EQ(surplus({}, 2), 0u);
  EXPECT_EQ(surplus({{1, 10, 0}, {2, 10, 0}}, 2), 0u);
}

TEST(Admission, TheProcessWithTheMostConnectionsLosesItsQuietestOne) {
  EXPECT_EQ(surplus({{1, 10, 0}, {2, 20, 5}, {3, 20, 3}, {4, 20, 9}}, 3), 3u);
}

TEST(Admission, AmongEqualsTheQuietestOneLeaves) {
  EXPECT_EQ(surplus({{1, 10, 7}, {2, 20, 5}, {3, 30, 9}}, 2), 2u);
}

TEST(LineBudget, LeavesOutWhatComesTooFastAndSaysSoOnce) {
  LineBudget budget;
  int written = 0;
  for (int i = 0; i < 1000; ++i) {
    written += budget.take();
  }
  EXPECT_EQ(written, LineBudget::kMost);
  uint64_t left_out = 0;
  for (int tick = 0; tick < LineBudget::kMost; ++tick) {
    left_out += budget.refill();
  }
  EXPECT_EQ(left_out, 1000u - LineBudget::kMost);
  EXPECT_TRUE(budget.take());
}

}  // namespace admission_test

}  // namespace reft::agent
