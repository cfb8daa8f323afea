#include "snapshot/commit/meeting_points.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>

namespace reft {
namespace meeting_points_test {

TEST(MeetingPoints, EachPointIsOneAsLongAsNoneIsMissed) {
  MeetingPoints points;
  for (int64_t point = 1; point < 10; ++point) {
    EXPECT_TRUE(points.isOne(point));
    points.took();
  }
}

TEST(MeetingPoints, AfterMissedPointsItIsAMultipleOfAPowerOfTwo) {
  MeetingPoints points;
  points.missed();
  EXPECT_FALSE(points.isOne(5));
  EXPECT_TRUE(points.isOne(6));
  for (int i = 1; i < 10; ++i) {
    points.missed();
  }
  EXPECT_FALSE(points.isOne(24));
  EXPECT_TRUE(points.isOne(32)) << "10 missed: 16 apart";
  points.took();
  EXPECT_TRUE(points.isOne(33));
}

TEST(MeetingPoints, ALongOutageDoesNotDelayTheNextSnapshotByAsMuch) {
  MeetingPoints points;
  for (int i = 0; i < 100'000; ++i) {
    points.missed();
  }
  EXPECT_TRUE(points.isOne(MeetingPoints::kFarthest * 3));
  EXPECT_FALSE(points.isOne(MeetingPoints::kFarthest * 3 + MeetingPoints::kFarthest / 2));
}

// Ranks with one slot to spare: what one has sealed keeps it for as many points as its copy takes,
// or one more, and the job commits a step that all have sealed.
TEST(MeetingPoints, RanksWhoseSlotsAreFreeAtDifferentPointsMeetAgain) {
  constexpr int kRanks = 8, kPoints = 2000;
  std::mt19937 random(1);
  for (const int copy : {2, 5, 8, 16, 31, 40}) {
    std::array<MeetingPoints, kRanks> points;
    std::array<int, kRanks> free_at{};
    for (int rank = 0; rank < kRanks; ++rank) {
      free_at[static_cast<size_t>(rank)] = static_cast<int>(random() % 50);
    }
    int committed = 0;
    for (int point = 1; point <= kPoints; ++point) {
      int sealed = 0;
      for (size_t rank = 0; rank < kRanks; ++rank) {
        if (free_at[rank] > point) {
          points[rank].missed();
        } else if (points[rank].isOne(point)) {
          points[rank].took();
          free_at[rank] = point + copy + (random() % 8 == 0 ? 1 : 0);
          ++sealed;
        }
      }
      committed += sealed == kRanks ? 1 : 0;
    }
    EXPECT_GE(committed, kPoints / (4 * copy + 4)) << "copies take " << copy << " points";
  }
}

}  // namespace meeting_points_test
}  // namespace reft
