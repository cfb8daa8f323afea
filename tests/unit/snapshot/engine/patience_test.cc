#include "snapshot/engine/patience.h"

#include <gtest/gtest.h>

namespace reft {
namespace patience_test {

TEST(PatienceTest, OneWaitInVainUntilTheNextOutcome) {
  Patience patience(0);
  EXPECT_TRUE(patience.mayWait(0));
  patience.starve(true);
  EXPECT_FALSE(patience.mayWait(1'000'000));
  patience.outcome();
  EXPECT_TRUE(patience.mayWait(1'000'000));
}

TEST(PatienceTest, WaitsInVainTakeAHundredthOfTheRun) {
  Patience patience(500);
  patience.waitedInVain(100);
  EXPECT_FALSE(patience.mayWait(500 + 9'999));
  EXPECT_TRUE(patience.mayWait(500 + 10'000));
  patience.waitedInVain(1);
  EXPECT_FALSE(patience.mayWait(500 + 10'000));
}

}  // namespace patience_test
}  // namespace reft
