#include "snapshot/protect/protection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>

#include "intercept/base/error.h"
#include "snapshot/state/table.h"

namespace reft {
namespace protection_test {

constexpr const char* kNames[] = {"none", "arc", "arc:2", "arc:3", "aec"};
constexpr const char* kCopies[] = {"none", "arc", "arc:2", "arc:3"};

std::vector<bool> lostSet(unsigned bits, uint32_t members) {
  std::vector<bool> lost(members);
  for (uint32_t member = 0; member < members; ++member) {
    lost[member] = (bits >> member & 1) != 0;
  }
  return lost;
}

MemberNodes apart(uint32_t members) {
  MemberNodes nodes(members);
  for (uint32_t member = 0; member < members; ++member) {
    nodes[member] = static_cast<int>(member);
  }
  return nodes;
}

std::vector<uint32_t> sorted(std::vector<uint32_t> shards) {
  std::sort(shards.begin(), shards.end());
  return shards;
}

// Every way in which up to `members` ranks lie on nodes, numbered by first appearance.
void eachShape(uint32_t members, const std::function<void(const MemberNodes&)>& visit) {
  MemberNodes nodes;
  const std::function<void(int)> extend = [&](int used) {
    if (nodes.size() == members) {
      visit(nodes);
      return;
    }
    for (int node = 0; node <= used; ++node) {
      nodes.push_back(node);
      extend(std::max(used, node + 1));
      nodes.pop_back();
    }
  };
  extend(0);
}

int countOf(const MemberNodes& nodes) {
  return 1 + *std::max_element(nodes.begin(), nodes.end());
}

uint32_t largestOf(const MemberNodes& nodes) {
  uint32_t largest = 0;
  for (int node = 0; node < countOf(nodes); ++node) {
    largest =
        std::max(largest, static_cast<uint32_t>(std::count(nodes.begin(), nodes.end(), node)));
  }
  return largest;
}

// The loss of the nodes whose bits are set, by its definition.
bool survivesLossOf(const Protection& protection, const MemberNodes& nodes, unsigned bits) {
  std::vector<bool> lost;
  for (const int node : nodes) {
    lost.push_back((bits >> node & 1) != 0);
  }
  return protection.survives(nodes, lost);
}

TEST(Protection, NamesAreThoseOfTheSettingAndOthersAreRefused) {
  for (const char* name : kNames) {
    EXPECT_EQ(Protection::named(name).name(), name);
  }
  try {
    Protection::named("raid");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "protection is 'raid'; allowed: none, arc, arc:2, arc:3, aec");
  }
}

TEST(Protection, NoneSurvivesNoLostMember) {
  for (unsigned lost = 0; lost < 1u << 4; ++lost) {
    EXPECT_EQ(Protection::named("none").survives(apart(4), lostSet(lost, 4)), lost == 0) << lost;
  }
}

TEST(Protection, CopiesSurviveUnlessAllHoldersOfAShardAreLost) {
  for (uint32_t copies = 0; copies < 4; ++copies) {
    for (uint32_t members = 2; members <= 8; ++members) {
      for (unsigned bits = 0; bits < 1u << members; ++bits) {
        const std::vector<bool> lost = lostSet(bits, members);
        bool gone = false;
        for (uint32_t member = 0; member < members; ++member) {
          bool all = true;
          for (uint32_t k = 0; k <= copies; ++k) {
            all = all && lost[(member + k) % members];
          }
          gone = gone || all;
        }
        EXPECT_EQ(Protection::named(kCopies[copies]).survives(apart(members), lost), !gone)
            << bits << " of " << members;
      }
    }
  }
}

TEST(Protection, AGroupOfOneStoresItsShardOnce) {
  EXPECT_EQ(Protection::named("arc:3").placement({0}), StoredShards({{0}}));
}

TEST(Protection, NoMemberStoresMoreThanTheOthers) {
  for (const char* name : kNames) {
    const Protection& protection = Protection::named(name);
    eachShape(6, [&](const MemberNodes& nodes) {
      const StoredShards stored = protection.placement(nodes);
      for (uint32_t member = 0; member < stored.size(); ++member) {
        ASSERT_EQ(stored[member].size(), stored[0].size());
        ASSERT_EQ(stored[member].front(), member) << "its own shard comes first";
        const std::vector<uint32_t> shards = sorted(stored[member]);
        ASSERT_EQ(std::adjacent_find(shards.begin(), shards.end()), shards.end());
      }
    });
  }
}

TEST(Protection, StoresSoManyTimesTheBytesOfAShard) {
  EXPECT_EQ(Protection::named("none").storedShards(apart(4)), 1);
  EXPECT_EQ(Protection::named("arc:2").storedShards(apart(4)), 3);
  EXPECT_EQ(Protection::named("arc:2").storedShards(apart(2)), 2);
  const Protection& aec = Protection::named("aec");
  EXPECT_EQ(aec.storedShards({0}), 1);
  EXPECT_EQ(aec.storedShards(apart(2)), 2);
  EXPECT_DOUBLE_EQ(aec.storedShards(apart(4)), 4.0 / 3);
  EXPECT_DOUBLE_EQ(aec.storedShards(apart(16)), 16.0 / 15);
  EXPECT_DOUBLE_EQ(aec.storedShards(apart(17)), 8.0 / 7) << "two sets";
  EXPECT_DOUBLE_EQ(aec.storedShards({0, 0, 0, 0, 1, 1, 1, 1}), 2) << "four sets of two";
  EXPECT_DOUBLE_EQ(aec.storedShards({0, 0, 1, 1, 2}), 2) << "sets of three and of two";
}

TEST(Protection, ParitySetsHoldEachMemberOnceAndOnNodesOfTheirOwnWhereThatIsPossible) {
  const Protection& aec = Protection::named("aec");
  for (uint32_t members = 2; members <= 9; ++members) {
    eachShape(members, [&](const MemberNodes& nodes) {
      std::vector<uint32_t> all;
      for (const std::vector<uint32_t>& set : aec.paritySets(nodes)) {
        ASSERT_GE(set.size(), 2u);
        ASSERT_LE(set.size(), 16u);
        all.insert(all.end(), set.begin(), set.end());
        if (largestOf(nodes) * 2 <= members) {
          std::vector<int> on;
          for (const uint32_t member : set) {
            on.push_back(nodes[member]);
          }
          std::sort(on.begin(), on.end());
          ASSERT_EQ(std::adjacent_find(on.begin(), on.end()), on.end())
              << testing::PrintToString(nodes);
        }
      }
      ASSERT_EQ(sorted(all), sorted(ringOf(apart(members))));
    });
  }
  EXPECT_TRUE(aec.paritySets({0}).empty());
  EXPECT_EQ(aec.paritySets(apart(100)).size(), 7u);
}

// A set is lost with two of its members; what it says is what every loss shows.
TEST(Protection, AParityBringsBackOneMemberOfEachSet) {
  const Protection& aec = Protection::named("aec");
  for (uint32_t members = 2; members <= 8; ++members) {
    for (const MemberNodes& nodes : {apart(members), MemberNodes(members)}) {
      const ParitySets sets = aec.paritySets(nodes);
      for (unsigned bits = 0; bits < 1u << members; ++bits) {
        bool gone = false;
        for (const std::vector<uint32_t>& set : sets) {
          gone = gone || std::count_if(set.begin(), set.end(), [&](uint32_t member) {
                           return (bits >> member & 1) != 0;
                         }) > 1;
        }
        ASSERT_EQ(aec.survives(nodes, lostSet(bits, members)), !gone) << bits << " of " << members;
      }
    }
  }
}

TEST(Protection, AParityThatIsDamagedOrOfNoSetIsOfNoUse) {
  const Protection& aec = Protection::named("aec");
  const ParitySets sets = {{0, 1, 2}};
  const auto recipes = aec.recipes({{0, 3}, {1, 4}, {}}, sets);
  ASSERT_EQ(recipes[2].size(), 1u);
  EXPECT_EQ(recipes[2][0], (Recipe{Decode::kXor, {{0, 3}, {1, 4}}}));
  EXPECT_EQ(recipes[0], std::vector<Recipe>({{Decode::kCopy, {{0, 0}}}}));
  EXPECT_TRUE(aec.recipes({{0, 3}, {1}, {}}, sets)[2].empty()) << "without a parity";
  EXPECT_TRUE(aec.recipes({{0, 3}, {4}, {}}, sets)[2].empty()) << "without a shard";
  EXPECT_TRUE(aec.recipes({{0, 3}, {1, 4}, {}}, {})[2].empty());
  EXPECT_TRUE(aec.recipes({{0, 3}, {1, 4}, {}}, {{0, 1}})[2].empty());
  EXPECT_TRUE(aec.recipes({{0, 1}, {}}, {{0}, {1}})[1].empty()) << "sets of one";
}

// What the protection says that it survives is what every loss of nodes shows.
TEST(Protection, SurvivalIsThatOfEveryLossOfNodes) {
  for (const char* name : kNames) {
    const Protection& protection = Protection::named(name);
    for (uint32_t members = 1; members <= 8; ++members) {
      eachShape(members, [&](const MemberNodes& nodes) {
        const Survival claimed = protection.survival(nodes);
        uint32_t survived = static_cast<uint32_t>(countOf(nodes));
        for (unsigned bits = 1; bits < 1u << countOf(nodes); ++bits) {
          if (!survivesLossOf(protection, nodes, bits)) {
            survived = std::min(survived, static_cast<uint32_t>(std::popcount(bits)) - 1);
          }
        }
        ASSERT_EQ(claimed.nodes, survived) << name << ", " << testing::PrintToString(nodes);
        unsigned weakest = 0;
        for (const uint32_t member : claimed.weakest) {
          weakest |= 1u << nodes[member];
        }
        ASSERT_EQ(static_cast<uint32_t>(std::popcount(weakest)), survived + 1);
        ASSERT_FALSE(survivesLossOf(protection, nodes, weakest));
      });
    }
  }
}

// A ring with k + 1 successive members on nodes of their own exists if no node has more than a
// (k + 1)th of the members.
TEST(Protection, KCopiesSurviveKNodesWhereverARingAllowsIt) {
  for (uint32_t copies = 1; copies < 4; ++copies) {
    for (uint32_t members = 2; members <= 8; ++members) {
      eachShape(members, [&](const MemberNodes& nodes) {
        const uint32_t survived = Protection::named(kCopies[copies]).survival(nodes).nodes;
        if (largestOf(nodes) * (copies + 1) <= members) {
          ASSERT_EQ(survived, copies) << testing::PrintToString(nodes);
        } else {
          ASSERT_LT(survived, copies) << testing::PrintToString(nodes);
        }
      });
    }
  }
}

TEST(Ring, NodesOfManyRanksTakeTurns) {
  EXPECT_EQ(ringOf({0, 0, 1, 1}), std::vector<uint32_t>({0, 2, 1, 3}));
  EXPECT_EQ(ringOf({7, 7, 7}), std::vector<uint32_t>({0, 1, 2})) << "one node: ascending";
  EXPECT_EQ(ringOf({3, 2, 1, 0}), std::vector<uint32_t>({0, 1, 2, 3})) << "one rank a node";
  EXPECT_TRUE(ringOf({}).empty());
}

TEST(Ring, MembersOfANodeLieAWidthApart) {
  for (uint32_t members = 2; members <= 9; ++members) {
    eachShape(members, [&](const MemberNodes& nodes) {
      const std::vector<uint32_t> ring = ringOf(nodes);
      ASSERT_EQ(sorted(ring), sorted(ringOf(apart(members)))) << "a permutation";
      const uint32_t width = members / largestOf(nodes);
      for (uint32_t at = 0; at < members; ++at) {
        for (uint32_t k = 1; k < width; ++k) {
          ASSERT_NE(nodes[ring[at]], nodes[ring[(at + k) % members]])
              << testing::PrintToString(nodes);
        }
      }
    });
  }
}

// What placement() promises is what the table of every member holds.
TEST(Protection, TablesHoldWhatPlacementNames) {
  constexpr uint32_t kMembers = 5;
  const MemberNodes nodes = {0, 0, 1, 1, 2};
  for (const char* name : kNames) {
    const Protection& protection = Protection::named(name);
    const StoredShards stored = protection.placement(nodes);
    const GroupInfo group{"g", {0, 1, 2, 3, 4}, protection.paritySets(nodes)};
    for (uint32_t member = 0; member < kMembers; ++member) {
      const SnapshotTable table =
          buildTable(static_cast<int>(member), kMembers, {{"r", "uint8", {64}, 640, 10, 0, false}},
                     {group}, name, {stored[member]}, 4096);
      std::vector<uint32_t> parts = table.shardsOf(0);
      if (table.holdsParityOf(0)) {
        parts.push_back(table.parityPart(0));
      }
      EXPECT_EQ(parts, sorted(stored[member])) << name << " " << member;
    }
  }
}

TEST(Protection, RecipesNameEveryMemberThatHasTheShard) {
  const auto recipes = Protection::named("arc").recipes({{0, 1}, {1, 2}, {}, {0, 2, 4}}, {});
  ASSERT_EQ(recipes.size(), 4u) << "a shard that the group has not is none";
  ASSERT_EQ(recipes[2].size(), 2u);
  EXPECT_EQ(recipes[2][0], (Recipe{Decode::kCopy, {{1, 2}}}));
  EXPECT_EQ(recipes[2][1], (Recipe{Decode::kCopy, {{3, 2}}}));
  EXPECT_TRUE(recipes[3].empty()) << "lost";
}

}  // namespace protection_test
}  // namespace reft
