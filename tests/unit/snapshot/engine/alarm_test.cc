#include "snapshot/engine/alarm.h"

#include <gtest/gtest.h>

#include "intercept/base/clock.h"

namespace reft {
namespace alarm_test {

using namespace std::chrono_literals;

// Ops go on, a step a second, and nothing is committed.
TEST(AlarmTest, OpsWithoutACommitRaiseItAfterTheLimit) {
  Alarm alarm(10s, 0);
  for (int64_t second = 1; second <= 20; ++second) {
    alarm.point(second, second * kSecond);
    EXPECT_EQ(alarm.check(second * kSecond, static_cast<uint64_t>(second), 1), second > 10);
  }
}

TEST(AlarmTest, AnIdleJobRaisesNone) {
  Alarm alarm(10s, 0);
  EXPECT_FALSE(alarm.check(5 * kSecond, 7, 1));
  EXPECT_FALSE(alarm.check(500 * kSecond, 7, 1)) << "no op since the check before";
  EXPECT_TRUE(alarm.check(501 * kSecond, 8, 1));
}

TEST(AlarmTest, OnceRaisedItStaysUntilACommit) {
  Alarm alarm(10s, 0);
  EXPECT_TRUE(alarm.check(11 * kSecond, 1, 1));
  EXPECT_TRUE(alarm.check(12 * kSecond, 1, 1)) << "though no op has begun since";
  EXPECT_TRUE(alarm.unprotected());
  alarm.committed(5, 12 * kSecond);
  EXPECT_FALSE(alarm.check(13 * kSecond, 2, 1));
  EXPECT_FALSE(alarm.unprotected());
  EXPECT_TRUE(alarm.check(23 * kSecond, 3, 1));
}

TEST(AlarmTest, SnapshotsThatAreRareByPlanRaiseNone) {
  Alarm alarm(10s, 0);
  alarm.point(1, 0);
  alarm.committed(4, 4 * kSecond);
  alarm.point(9, 40 * kSecond);  // five steps of 7 s, one in four with a snapshot
  EXPECT_FALSE(alarm.check(41 * kSecond, 1, 4));
  EXPECT_FALSE(alarm.check(50 * kSecond, 2, 4));
  EXPECT_TRUE(alarm.check(51 * kSecond, 3, 4)) << "the newest point is older than the limit";
}

TEST(AlarmTest, TooManyStepsWithoutASnapshotAreNoPlan) {
  Alarm alarm(10s, 0);
  alarm.point(1, 0);
  alarm.committed(4, 4 * kSecond);
  alarm.point(10, 40 * kSecond);
  EXPECT_TRUE(alarm.check(41 * kSecond, 1, 4));
  EXPECT_TRUE(alarm.check(41 * kSecond, 2, 1));
}

TEST(AlarmTest, AResumedJobBeginsBehindItsRestoredStep) {
  Alarm alarm(10s, 0);
  alarm.point(1000, 11 * kSecond);
  EXPECT_FALSE(alarm.check(12 * kSecond, 1, 4)) << "one step behind what it was restored from";
}

}  // namespace alarm_test
}  // namespace reft
