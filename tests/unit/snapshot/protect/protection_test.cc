#include "snapshot/protect/protection.h"

#include <gtest/gtest.h>

#include "intercept/base/error.h"
#include "snapshot/state/table.h"

namespace reft {
namespace protection_test {

std::vector<bool> lostSet(unsigned bits, uint32_t members) {
  std::vector<bool> lost(members);
  for (uint32_t member = 0; member < members; ++member) {
    lost[member] = (bits >> member & 1) != 0;
  }
  return lost;
}

TEST(Protection, NamesAreThoseOfTheSettingAndOthersAreRefused) {
  EXPECT_EQ(Protection::named("none").name(), "none");
  EXPECT_EQ(Protection::named("arc").name(), "arc");
  try {
    Protection::named("raid");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "protection is 'raid'; allowed: none, arc");
  }
}

TEST(Protection, NoneSurvivesNoLostMember) {
  for (unsigned lost = 0; lost < 1u << 4; ++lost) {
    EXPECT_EQ(Protection::named("none").survives(lostSet(lost, 4)), lost == 0) << lost;
  }
}

TEST(Protection, ArcSurvivesUnlessTwoNeighboursAreLost) {
  for (uint32_t members = 2; members <= 6; ++members) {
    for (unsigned bits = 0; bits < 1u << members; ++bits) {
      const std::vector<bool> lost = lostSet(bits, members);
      bool neighbours = false;
      for (uint32_t member = 0; member < members; ++member) {
        neighbours = neighbours || (lost[member] && lost[(member + members - 1) % members]);
      }
      EXPECT_EQ(Protection::named("arc").survives(lost), !neighbours) << bits << " of " << members;
    }
  }
}

TEST(Protection, AGroupOfOneStoresItsShardOnce) {
  EXPECT_EQ(Protection::named("arc").storedBy(0, 1), std::vector<uint32_t>({0}));
}

// What storedBy() promises is what the table of every member holds.
TEST(Protection, TablesHoldWhatStoredByNames) {
  constexpr uint32_t kMembers = 5;
  const GroupInfo group{"g", {0, 1, 2, 3, 4}};
  for (const char* name : {"none", "arc"}) {
    const Protection& protection = Protection::named(name);
    for (uint32_t member = 0; member < kMembers; ++member) {
      const SnapshotTable table =
          buildTable(static_cast<int>(member), kMembers, {{"r", "uint8", {64}, 640, 10, 0, false}},
                     {group}, name, protection.furtherShards(), 4096);
      EXPECT_EQ(table.shardsOf(0), protection.storedBy(member, kMembers)) << name << " " << member;
    }
  }
}

TEST(Protection, RecipesNameEveryMemberThatHasTheShard) {
  const auto recipes = Protection::named("arc").recipes({{0, 1}, {1, 2}, {}, {0, 2, 4}});
  ASSERT_EQ(recipes.size(), 4u) << "a shard that the group has not is none";
  ASSERT_EQ(recipes[2].size(), 2u);
  EXPECT_EQ(recipes[2][0], (Recipe{Decode::kCopy, {{1, 2}}}));
  EXPECT_EQ(recipes[2][1], (Recipe{Decode::kCopy, {{3, 2}}}));
  EXPECT_TRUE(recipes[3].empty()) << "lost";
}

}  // namespace protection_test
}  // namespace reft
