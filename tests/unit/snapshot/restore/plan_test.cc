#include "snapshot/restore/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/cut.h"
#include "tests/unit/snapshot/restore/replicas.h"

namespace reft {
namespace plan_test {

void addStep(std::vector<VaultSummary>& vaults, const std::vector<VaultSummary>& more) {
  for (size_t i = 0; i < vaults.size(); ++i) {
    vaults[i].slots.insert(vaults[i].slots.end(), more[i].slots.begin(), more[i].slots.end());
  }
}

std::vector<int> nodesOf(const RestorePlan& plan) {
  std::vector<int> nodes;
  for (const VaultPlace& place : plan.vaults) {
    nodes.push_back(place.node);
  }
  return nodes;
}

// Per shard: the ranks whose vaults hold it.
std::vector<std::vector<int>> holdersOf(const RestorePlan& plan, const std::string& id) {
  const GroupPlan& group = plan.groups.at(id);
  std::vector<std::vector<int>> holders(group.recipes.size());
  for (size_t shard = 0; shard < holders.size(); ++shard) {
    for (const Recipe& recipe : group.recipes[shard]) {
      holders[shard].push_back(group.ranks[recipe.parts.at(0).member]);
    }
  }
  return holders;
}

std::vector<uint32_t> sorted(std::vector<uint32_t> shards) {
  std::sort(shards.begin(), shards.end());
  return shards;
}

// A second group of each rank: the even or the odd ranks.
void addTeams(std::vector<VaultSummary>& vaults, int world) {
  for (int parity = 0; parity < 2; ++parity) {
    SharedGroup team{"team " + std::to_string(parity), {}};
    for (int rank = parity; rank < world; rank += 2) {
      team.ranks.push_back(rank);
    }
    const auto shared = std::make_shared<const SharedGroup>(team);
    const auto members = static_cast<uint32_t>(team.ranks.size());
    for (uint32_t member = 0; member < members; ++member) {
      const auto rank = static_cast<size_t>(team.ranks[member]);
      vaults[rank].slots.back().groups.push_back(
          {shared, sorted(Protection::named("arc").placement(MemberNodes(members))[member]), 7});
    }
  }
}

TEST(JobShape, NodesMayDifferInSizeAndTakeTurns) {
  const JobShape uneven(std::vector<int>{0, 0, 1});
  EXPECT_EQ(uneven.world, 3);
  EXPECT_EQ(uneven.nodeOf(2), 1);
  EXPECT_EQ(uneven.firstOf(1), 2);
  EXPECT_EQ(uneven.firstOf(2), -1);
  EXPECT_EQ(uneven.firstOf(-1), -1);
  const JobShape dealt(std::vector<int>{0, 1, 0, 1});
  EXPECT_EQ(dealt.firstOf(1), 1);
  EXPECT_EQ(dealt.nodeOf(2), 0);
  EXPECT_EQ(JobShape(5, 2).node_of, std::vector<int>({0, 0, 1, 1, 2}));
  EXPECT_THROW(JobShape(std::vector<int>({0, 7})), InvalidArgument);
  EXPECT_THROW(JobShape(std::vector<int>({0, -1})), InvalidArgument);
}

TEST(PlanRestore, RanksThatAreDealtRoundHaveTheirVaultsNear) {
  std::vector<VaultSummary> vaults = replicas(3, 11, 0);
  for (VaultSummary& vault : vaults) {
    vault.node = vault.rank % 2;
  }
  const RestorePlan plan = *planRestore(vaults, JobShape(std::vector<int>{0, 1, 0})).plan;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(plan.isNear(rank, rank));
    EXPECT_EQ(plan.readerOf(rank), rank);
  }
  EXPECT_FALSE(plan.isNear(1, 0));
  vaults[2].node = 1;  // it moved
  EXPECT_EQ(planRestore(vaults, JobShape(std::vector<int>{0, 1, 0})).plan->readerOf(2), 1);
  vaults[2].node = 2;  // the job has no such node
  EXPECT_FALSE(planRestore(vaults, JobShape(std::vector<int>{0, 1, 0})).plan);
}

TEST(PlanRestore, NothingSealedMeansNoPlanAndNoComplaint) {
  EXPECT_FALSE(planRestore({}, {4, 2}).plan);
  EXPECT_TRUE(planRestore({{0, 0, {}}, {1, 0, {}}}, {2, 2}).rejected.empty());
}

// Rank 2's node is lost, and its keeper has no copy of the newest step yet.
TEST(PlanRestore, AnOlderStepWithTheSmallStateOfEveryRankComesFirst) {
  std::vector<VaultSummary> vaults = replicas(4, 10, 0);
  addStep(vaults, replicas(4, 11, 1));
  vaults[2].node = 3;
  vaults[2].is_copy = true;
  std::erase_if(vaults[2].slots, [](const SlotSummary& slot) { return slot.step == 11; });
  const RestoreDecision result = planRestore(vaults, {4, 1});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->step, 10);
  EXPECT_TRUE(result.plan->donor.empty());
  ASSERT_EQ(result.rejected.size(), 1u);
  EXPECT_EQ(result.rejected[0],
            "step 11: the small state of ranks is lost, and step 10 has all of it");
  // Where none has it, the newest one.
  vaults[2].slots.clear();
  const RestoreDecision newest = planRestore(vaults, {4, 1});
  ASSERT_TRUE(newest.plan);
  EXPECT_EQ(newest.plan->step, 11);
  EXPECT_TRUE(newest.plan->donor.contains(2));
  EXPECT_TRUE(newest.rejected.empty());
}

// The same with fewer ranks, of which one follows the lost one.
TEST(PlanRestore, FewerRanksPreferAWholeStepToo) {
  std::vector<VaultSummary> vaults = replicas(4, 10, 3);
  addStep(vaults, replicas(4, 11, 3));
  for (VaultSummary& vault : vaults) {
    vault.world = 4;
    vault.node = 0;
  }
  vaults[2].is_copy = true;
  std::erase_if(vaults[2].slots, [](const SlotSummary& slot) { return slot.step == 11; });
  const RestoreDecision whole = planRestore(vaults, {3, 3});
  ASSERT_TRUE(whole.plan);
  EXPECT_EQ(whole.plan->step, 10);
  EXPECT_TRUE(whole.plan->replaced.empty());
  // No rank follows the lost one.
  EXPECT_EQ(planRestore(vaults, {2, 2}).plan->step, 11);
  vaults[2].slots.clear();
  const RestoreDecision newest = planRestore(vaults, {3, 3});
  ASSERT_TRUE(newest.plan);
  EXPECT_EQ(newest.plan->step, 11);
  EXPECT_EQ(newest.plan->replaced, std::vector<int>{2});
}

// The attempt that took the newest step went on from an older one, which is whole.
TEST(PlanRestore, WhatAnAttemptResumedFromIsBeforeIt) {
  std::vector<VaultSummary> vaults = replicas(4, 10, 0, kInc);
  addStep(vaults, replicas(4, 12, 1, kInc + 1));
  vaults[2].is_copy = true;
  std::erase_if(vaults[2].slots, [](const SlotSummary& slot) { return slot.step == 12; });
  EXPECT_EQ(planRestore(vaults, {4, 2}).plan->step, 12);  // that one may have been left
  vaults[0].writer = kInc + 1;
  vaults[0].resumed = 10;
  EXPECT_EQ(planRestore(vaults, {4, 2}).plan->step, 10);
}

TEST(PlanRestore, SaysThatThereAreFewerRanksThanBefore) {
  for (const auto& vaults :
       {replicas(2, 10, 0), std::vector<VaultSummary>{replicas(2, 10, 0)[0]}}) {
    const RestoreDecision result = planRestore(vaults, {1, 2});
    EXPECT_FALSE(result.plan);
    ASSERT_EQ(result.rejected.size(), 1u);
    EXPECT_NE(result.rejected[0].find("made by at least 2 ranks, and there are 1 now"),
              std::string::npos)
        << result.rejected[0];
  }
}

TEST(PlanRestore, TakesTheStepBeforeIfAsked) {
  std::vector<VaultSummary> vaults = replicas(2, 10, 0);
  addStep(vaults, replicas(2, 11, 1));
  EXPECT_EQ(planRestore(vaults, {2, 2}).plan->step, 11);
  EXPECT_EQ(planRestore(vaults, {2, 2}, 11).plan->step, 10);
  const RestoreDecision none = planRestore(vaults, {2, 2}, 10);
  EXPECT_FALSE(none.plan);
  EXPECT_TRUE(none.rejected.empty());
}

TEST(PlanRestore, TakesTheNewestStepThatEverybodyHas) {
  auto vaults = replicas(4, 10, 0);
  addStep(vaults, replicas(4, 11, 0));
  const RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->step, 11);
  EXPECT_EQ(result.plan->incarnation, kInc);
  EXPECT_EQ(nodesOf(*result.plan), std::vector<int>({0, 0, 1, 1}));
  EXPECT_TRUE(result.plan->donor.empty());
  EXPECT_EQ(holdersOf(*result.plan, "g"), (std::vector<std::vector<int>>{{0}, {1}, {2}, {3}}));
  EXPECT_TRUE(result.rejected.empty());
}

TEST(PlanRestore, FallsBackToAnOlderStepAndSaysWhy) {
  auto vaults = replicas(4, 10, 0);
  addStep(vaults, replicas(4, 11, 0));
  vaults[2].slots.pop_back();  // killed before it sealed step 11
  const RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->step, 10);
  ASSERT_EQ(result.rejected.size(), 1u);
  EXPECT_EQ(result.rejected[0], "step 11: rank 2 has not sealed it");
}

TEST(PlanRestore, AVaultThatIsInPlaceOfALostOneSaysNothingOfTheStepsBefore) {
  constexpr uint64_t kNext = kInc + 1;
  auto vaults = replicas(4, 11, 1);
  vaults[2].slots.clear();  // lost, and made again by the attempt after, which died in its restore
  vaults[2].writer = kNext;
  RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan) << result.rejected[0];
  EXPECT_EQ(result.plan->step, 11);
  EXPECT_TRUE(result.plan->donor.contains(2));
  // That attempt went on from step 11, and this rank alone has sealed a step of it.
  vaults[2].slots = replicas(4, 12, 1, kNext)[2].slots;
  vaults[2].resumed = 11;
  result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->step, 11);
  EXPECT_TRUE(result.plan->donor.contains(2));
}

TEST(PlanRestore, AVaultThatWasThereStopsAStepThatItHasNot) {
  auto vaults = replicas(4, 11, 1);
  vaults[2].slots.clear();  // killed before it sealed its first step
  vaults[2].writer = kInc;
  EXPECT_FALSE(planRestore(vaults, {4, 2}).plan);
  // Its attempt went on from another step, so step 11 was given up.
  vaults[2].slots = replicas(4, 10, 1, kInc + 1)[2].slots;
  vaults[2].writer = kInc + 1;
  vaults[2].resumed = 9;
  EXPECT_FALSE(planRestore(vaults, {4, 2}).plan);
}

TEST(PlanRestore, TheOwnVaultComesBeforeItsCopyAndACopyIsAsGoodAsIt) {
  auto vaults = replicas(4, 11, 0);
  VaultSummary copy = vaults[3];  // of rank 3, on node 0
  copy.node = 0;
  copy.is_copy = true;
  vaults.insert(vaults.begin(), copy);
  RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(nodesOf(*result.plan), std::vector<int>({0, 0, 1, 1}));
  vaults.pop_back();
  result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(nodesOf(*result.plan), std::vector<int>({0, 0, 1, 0}));
  EXPECT_TRUE(result.plan->donor.empty());
}

TEST(PlanRestore, AWholeCopyComesBeforeAVaultWithADamagedPart) {
  auto vaults = replicas(4, 11, 0);
  VaultSummary copy = vaults[3];
  copy.node = 0;
  copy.is_copy = true;
  vaults.push_back(copy);
  vaults[3].slots[0].groups[0].shards.clear();
  const RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan) << result.rejected[0];
  EXPECT_EQ(result.plan->vaults[3].node, 0);
  EXPECT_TRUE(result.plan->vaults[3].is_copy);
}

// A rank that was lost has been started again on the node that keeps its copy.
TEST(PlanRestore, ACopyOnTheRanksOwnNodeStandsInForANewVaultThere) {
  auto vaults = replicas(4, 11, 0);
  VaultSummary copy = vaults[3];
  copy.is_copy = true;
  copy.slots[0].slot = 2;
  vaults[3].slots.clear();
  vaults[3].writer = kInc + 1;
  vaults[3].resumed = 11;
  vaults.push_back(copy);
  const RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan) << result.rejected[0];
  EXPECT_EQ(nodesOf(*result.plan), std::vector<int>({0, 0, 1, 1}));
  EXPECT_TRUE(result.plan->vaults[3].is_copy);
  EXPECT_EQ(result.plan->vaults[3].slot, 2u);
  EXPECT_TRUE(result.plan->isNear(3, 3));
  EXPECT_FALSE(result.plan->takesOwn(3)) << "its own vault has nothing at that slot";
  EXPECT_TRUE(result.plan->takesOwn(2));
  EXPECT_TRUE(result.plan->donor.empty());
}

TEST(PlanRestore, ACopyThatIsBehindDoesNotStopAStepThatReplicasHave) {
  auto vaults = replicas(4, 11, 1);
  vaults[3] = replicas(4, 10, 1)[3];
  vaults[3].node = 0;
  vaults[3].is_copy = true;
  const RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan) << result.rejected[0];
  EXPECT_EQ(result.plan->step, 11);
  EXPECT_TRUE(result.plan->donor.contains(3));
}

// From the agent of a host that has no rank any more: what it lacks was never sealed.
TEST(PlanRestore, AStepThatIsNotInAWholeCopyIsNotTakenFromReplicas) {
  auto vaults = replicas(4, 11, 1);
  vaults[3] = replicas(4, 10, 1)[3];
  vaults[3].node = 0;
  vaults[3].is_copy = true;
  vaults[3].writer = kInc;
  const RestoreDecision result = planRestore(vaults, {4, 2});
  EXPECT_FALSE(result.plan);
  ASSERT_FALSE(result.rejected.empty());
  EXPECT_NE(result.rejected[0].find("rank 3 has not sealed it"), std::string::npos);
}

TEST(PlanRestore, DoesNotRebuildARankThatIsThereFromACopy) {
  auto vaults = replicas(4, 11, 1);
  vaults[2].slots.clear();
  EXPECT_FALSE(planRestore(vaults, {4, 2}).plan);
}

TEST(PlanRestore, RebuildsALostRankFromTheCopyOfItsShard) {
  auto vaults = replicas(4, 11, 1);
  vaults.erase(vaults.begin() + 2);
  const RestoreDecision result = planRestore(vaults, {4, 2});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(nodesOf(*result.plan), std::vector<int>({0, 0, -1, 1}));
  EXPECT_EQ(result.plan->donor, (std::map<int, int>{{2, 0}}));
  EXPECT_EQ(holdersOf(*result.plan, "g")[2], std::vector<int>({1}));
}

// As with tensor parallelism on two replicas: all ranks share norms, each pair its part.
TEST(PlanRestore, ALostRankTakesTheStateOfARankWithTheSameGroups) {
  auto vaults = replicas(4, 11, 1);
  addTeams(vaults, 4);  // {0, 2} and {1, 3}
  vaults.erase(vaults.begin() + 1);
  const RestoreDecision result = planRestore(vaults, {4, 1});
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->donor, (std::map<int, int>{{1, 3}}));
  vaults.pop_back();  // rank 3
  EXPECT_EQ(planRestore(vaults, {4, 1}).rejected.at(0),
            "step 11: no rank is left that shared all that rank 1 did");
}

TEST(PlanRestore, StateThatOneRankHadIsNotReplacedByAnothers) {
  auto vaults = replicas(4, 11, 1);
  vaults.erase(vaults.begin() + 1);
  vaults[2].slots[0].only_here = "o0.p3";
  EXPECT_EQ(planRestore(vaults, {4, 2}).rejected.at(0),
            "step 11: rank 1 may have had state that no other rank has, as o0.p3 of rank 3");
}

// The vaults as a job of `world` ranks wrote them.
std::vector<VaultSummary> writtenBy(int world, std::vector<VaultSummary> vaults) {
  for (VaultSummary& vault : vaults) {
    vault.world = world;
  }
  return vaults;
}

TEST(PlanRestore, FewerRanksTakeWhatTheReplicasOfThenSaved) {
  const auto vaults = writtenBy(4, replicas(4, 11, 1));
  const RestorePlan plan = *planRestore(vaults, JobShape(std::vector<int>{0, 0, 1})).plan;
  EXPECT_EQ(plan.savedBy(), 4);
  EXPECT_TRUE(plan.isResized());
  EXPECT_EQ(plan.donor, (std::map<int, int>{{0, 0}, {1, 1}, {2, 2}}));
  EXPECT_FALSE(plan.takesOwn(0)) << "its vault is of another job";
  EXPECT_EQ(plan.readerOf(3), 2) << "rank 3 is no more, and its vault is on node 1";
  for (int rank = 0; rank < 3; ++rank) {  // all that is received is sent
    for (const Transfer& transfer : transfersOf(plan, rank)) {
      const auto sent = transfersOf(plan, transfer.sender);
      EXPECT_TRUE(std::any_of(sent.begin(), sent.end(), [&](const Transfer& other) {
        return other.receiver == transfer.receiver && other.tag == transfer.tag;
      }));
    }
  }
}

TEST(PlanRestore, MoreRanksTakeThemInTurn) {
  auto vaults = writtenBy(3, replicas(3, 11, 1));
  EXPECT_EQ(planRestore(vaults, {5, 2}).plan->donor,
            (std::map<int, int>{{0, 0}, {1, 1}, {2, 2}, {3, 0}, {4, 1}}));
  vaults.erase(vaults.begin() + 1);  // rank 0 has its shard, too
  EXPECT_EQ(planRestore(vaults, {5, 2}).plan->donor,
            (std::map<int, int>{{0, 0}, {1, 0}, {2, 2}, {3, 0}, {4, 0}}));
  vaults = writtenBy(1, replicas(1, 11, 0));
  vaults[0].slots[0].groups.clear();
  vaults[0].slots[0].indivisible = "0.weight";
  EXPECT_EQ(planRestore(vaults, {2, 2}).plan->donor, (std::map<int, int>{{0, 0}, {1, 0}}));
}

TEST(PlanRestore, AnotherNumberOfRanksTakesNoPartsOfAModel) {
  auto vaults = writtenBy(4, replicas(4, 11, 1));
  vaults[2].slots[0].indivisible = "o0.p3";
  EXPECT_EQ(
      planRestore(vaults, {3, 2}).rejected.at(0),
      "step 11: 4 ranks saved it, and o0.p3 of rank 2 is a part that no other rank has: start "
      "4 ranks to resume from it");
  vaults = writtenBy(4, replicas(4, 11, 1));
  SharedGroup stage{"stage", {0, 1}};  // no other ranks have such a part
  for (size_t rank = 0; rank < 2; ++rank) {
    vaults[rank].slots[0].groups.push_back(
        {std::make_shared<const SharedGroup>(stage), {static_cast<uint32_t>(rank)}, 7});
  }
  EXPECT_EQ(planRestore(vaults, {2, 1}).rejected.at(0),
            "step 11: 4 ranks saved it, of which 2 share a part that the others have not (group "
            "stage): start 4 ranks to resume from it");
  EXPECT_TRUE(planRestore(vaults, {4, 2}).plan);
}

TEST(PlanRestore, EveryNthRankGoesOnWithTheSamePartOfAModel) {
  auto vaults = writtenBy(4, replicas(4, 11, 1));
  addTeams(vaults, 4);  // {0, 2} and {1, 3}
  EXPECT_EQ(planRestore(vaults, {2, 1}).plan->donor, (std::map<int, int>{{0, 0}, {1, 1}}));
  EXPECT_EQ(planRestore(vaults, {6, 3}).plan->donor,
            (std::map<int, int>{{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 0}, {5, 1}}));
  EXPECT_EQ(planRestore(vaults, {3, 2}).rejected.at(0),
            "step 11: 4 ranks saved it, which had a model in 2 parts: start a multiple of 2 ranks "
            "to resume from it");
  vaults.erase(vaults.begin() + 1);  // rank 3 has the same part
  EXPECT_EQ(planRestore(vaults, {2, 1}).plan->donor, (std::map<int, int>{{0, 0}, {1, 3}}));
}

TEST(PlanRestore, TheStepsOfTheJobThatRanLastComeFirst) {
  auto vaults = writtenBy(4, replicas(4, 11, 0));
  auto fewer = writtenBy(2, replicas(2, 30, 0));
  vaults.insert(vaults.end(), fewer.begin(), fewer.end());
  const auto setSince = [&vaults](uint64_t of_four, uint64_t of_two) {
    for (VaultSummary& vault : vaults) {
      vault.since = vault.world == 4 ? of_four : of_two;
    }
  };
  setSince(100, 200);
  EXPECT_EQ(planRestore(vaults, {4, 2}).plan->step, 30);
  EXPECT_EQ(planRestore(vaults, {4, 2}).plan->savedBy(), 2);
  EXPECT_EQ(planRestore(vaults, {4, 2}, 30).plan->savedBy(), 4);
  EXPECT_FALSE(planRestore(vaults, {4, 2}, 30).plan->isResized());
  setSince(300, 200);  // it began anew, without what the two had
  EXPECT_EQ(planRestore(vaults, {2, 1}).plan->step, 11);
  EXPECT_EQ(planRestore(vaults, {4, 2}).plan->step, 11);
  vaults.pop_back();  // rank 1 of 2 has a vault of the 4, too, which says nothing about this step
  setSince(100, 200);
  EXPECT_EQ(planRestore(vaults, {4, 2}).rejected.at(0),
            "step 30: shard 1 of group g is not sealed anywhere");
}

TEST(PlanRestore, WithoutCopiesALostShardIsNamed) {
  auto vaults = replicas(4, 11, 0);
  vaults.erase(vaults.begin() + 2);
  const RestoreDecision result = planRestore(vaults, {4, 2});
  EXPECT_FALSE(result.plan);
  EXPECT_EQ(result.rejected.at(0), "step 11: shard 2 of group g is not sealed anywhere");
}

TEST(PlanRestore, ArcSurvivesEveryLossThatLeavesEveryShardSomewhere) {
  for (unsigned lost = 0; lost < 1u << 5; ++lost) {
    const auto all = replicas(5, 11, 1);
    std::vector<VaultSummary> vaults;
    bool covered = lost != 31;
    for (unsigned rank = 0; rank < 5; ++rank) {
      if ((lost >> rank & 1) == 0) {
        vaults.push_back(all[rank]);
      }
      // The shard of `rank` is held by itself and by the member before.
      covered = covered && !((lost >> rank & 1) != 0 && (lost >> ((rank + 4) % 5) & 1) != 0);
    }
    EXPECT_EQ(planRestore(vaults, {5, 2}).plan.has_value(), covered) << "lost set " << lost;
  }
}

TEST(PlanRestore, RefusesReplicasThatDiffer) {
  auto vaults = replicas(3, 11, 0);
  vaults[1].slots[0].groups[0].digest = 98;
  const RestoreDecision result = planRestore(vaults, {3, 2});
  EXPECT_FALSE(result.plan);
  EXPECT_NE(result.rejected.at(0).find("silent data corruption"), std::string::npos);
}

// A vault records the digests of 64 groups; a further one is 0 = not known, which is not a
// difference.
TEST(PlanRestore, AnUnknownDigestIsNoDifference) {
  auto vaults = replicas(3, 11, 0);
  vaults[0].slots[0].groups[0].digest = 0;
  EXPECT_TRUE(planRestore(vaults, {3, 2}).plan);
  vaults = replicas(3, 11, 0);
  vaults[1].slots[0].groups[0].digest = 0;
  EXPECT_TRUE(planRestore(vaults, {3, 2}).plan);
  vaults[2].slots[0].groups[0].digest = 98;
  EXPECT_FALSE(planRestore(vaults, {3, 2}).plan) << "the two that are known differ";
}

TEST(PlanRestore, RefusesMembersThatDisagreeAboutTheirGroup) {
  auto vaults = replicas(3, 11, 0);
  vaults[1].slots[0].groups[0].shared =
      std::make_shared<const SharedGroup>(SharedGroup{"g", {0, 1}});
  EXPECT_FALSE(planRestore(vaults, {3, 2}).plan);
}

TEST(PlanRestore, NeverMixesIncarnations) {
  auto vaults = replicas(2, 11, 0, 1);
  vaults[1].slots[0].incarnation = 2;
  EXPECT_FALSE(planRestore(vaults, {2, 2}).plan);
  addStep(vaults, replicas(2, 9, 0, 1));
  ASSERT_TRUE(planRestore(vaults, {2, 2}).plan);
  EXPECT_EQ(planRestore(vaults, {2, 2}).plan->step, 9);
}

TEST(PlanRestore, TakesTheLowerNodeWhenTwoShowTheSameRank) {
  auto vaults = replicas(2, 11, 0);
  vaults.push_back(vaults[0]);
  vaults.back().node = 7;
  std::mt19937 random(1);
  for (int i = 0; i < 10; ++i) {
    std::shuffle(vaults.begin(), vaults.end(), random);
    EXPECT_EQ(nodesOf(*planRestore(vaults, {2, 2}).plan), std::vector<int>({0, 0}));
  }
}

TEST(PlanRestore, RanksOutsideOfTheWorldCountForNothing) {
  auto vaults = replicas(2, 11, 0);
  vaults.push_back({9, 0, {{0, 12, kInc, 0, {}}}});
  vaults.push_back({-1, 0, {{0, 12, kInc, 0, {}}}});
  ASSERT_TRUE(planRestore(vaults, {2, 2}).plan);
  EXPECT_EQ(planRestore(vaults, {2, 2}).plan->step, 11);
}

TEST(PlanRestore, PrivateRanksNeedTheirOwnVault) {
  std::vector<VaultSummary> vaults = {{0, 0, {{0, 4, kInc, 0, {}}}}, {1, 0, {{0, 4, kInc, 0, {}}}}};
  EXPECT_TRUE(planRestore(vaults, {2, 2}).plan);
  vaults.pop_back();
  EXPECT_FALSE(planRestore(vaults, {2, 2}).plan);
}

TEST(PlanRestore, RefusesPointsOfTheProgramThatDoNotBelongTogether) {
  auto vaults = replicas(3, 11, 0);
  vaults[0].slots[0].cut = 40;
  vaults[1].slots[0].cut = 2;
  vaults[2].slots[0].cut = 0 - uint64_t{42};
  EXPECT_TRUE(planRestore(vaults, {3, 2}).plan);
  vaults[1].slots[0].cut = 3;
  const RestoreDecision result = planRestore(vaults, {3, 2});
  EXPECT_FALSE(result.plan);
  EXPECT_NE(result.rejected.at(0).find("different points of the program"), std::string::npos);
  vaults[2].slots[0].cut = kUnknownCut;
  EXPECT_TRUE(planRestore(vaults, {3, 2}).plan);
}

TEST(PlanRestore, RefusesAProtectionThatThisVersionDoesNotKnow) {
  auto vaults = replicas(2, 11, 0);
  vaults[0].slots[0].protection = "raid";
  const RestoreDecision result = planRestore(vaults, {2, 2});
  EXPECT_FALSE(result.plan);
  EXPECT_EQ(result.rejected.at(0),
            "step 11: group g: protection is 'raid'; allowed: none, arc, arc:2, arc:3, aec");
}

TEST(PlanRestore, ShardsWithoutBytesNeedNoVault) {
  auto vaults = replicas(4, 11, 0);
  const auto shared = std::make_shared<const SharedGroup>(SharedGroup{"g", {0, 1, 2, 3}, {1, 3}});
  for (VaultSummary& vault : vaults) {
    GroupSummary& group = vault.slots[0].groups[0];
    group.shared = shared;
    std::erase_if(group.shards, [](uint32_t shard) { return shard % 2 == 1; });
  }
  const RestorePlan plan = *planRestore(vaults, {4, 2}).plan;
  EXPECT_EQ(holdersOf(plan, "g"), std::vector<std::vector<int>>({{0}, {}, {2}, {}}));
  for (const Transfer& transfer : transfersOf(plan, 2)) {
    EXPECT_NE(transfer.shard % 2, 1u);
  }
  vaults[1].slots[0].groups[0].shared =
      std::make_shared<const SharedGroup>(SharedGroup{"g", {0, 1, 2, 3}, {1}});
  EXPECT_EQ(planRestore(vaults, {4, 2}).rejected.at(0),
            "step 11: members disagree about what group g shares");
  vaults = replicas(4, 11, 0);
  for (VaultSummary& vault : vaults) {
    vault.slots[0].groups[0].shared = shared;
    vault.slots[0].groups[0].shards.clear();
  }
  EXPECT_EQ(planRestore(vaults, {4, 2}).rejected.at(0),
            "step 11: shard 0 of group g is not sealed anywhere");
}

TEST(PlanRestore, RefusesAVaultOutsideOfItsOwnGroup) {
  auto vaults = replicas(3, 11, 0);
  vaults[2].slots[0].groups[0].shared =
      std::make_shared<const SharedGroup>(SharedGroup{"other", {0, 1}});
  EXPECT_EQ(planRestore(vaults, {3, 2}).rejected.at(0),
            "step 11: rank 2 is not a member of its group other");
}

TEST(TransfersOf, NothingCrossesWhenEveryNodeHasEveryShard) {
  const RestorePlan plan = *planRestore(replicas(2, 11, 0), {2, 2}).plan;
  EXPECT_TRUE(transfersOf(plan, 0).empty());
  EXPECT_TRUE(transfersOf(plan, 1).empty());
}

using Row = std::tuple<int, uint32_t, int, int, std::string, uint32_t>;

Row rowOf(const Transfer& t) {
  return {t.receiver, t.tag, t.sender, t.vault, t.group, t.shard};
}

// Random jobs with random losses: what one rank sends, another one receives, in one order.
TEST(TransfersOf, SendsAndReceivesOfAllRanksPairUpInOneOrder) {
  std::mt19937 random(8);
  int planned = 0;
  for (int round = 0; round < 300; ++round) {
    const int world = 1 + static_cast<int>(random() % 12);
    const JobShape shape{world, 2};  // replicas() puts two ranks on a node
    auto vaults = replicas(world, 11, 1);
    addTeams(vaults, world);
    std::erase_if(vaults, [&](const VaultSummary&) { return random() % 6 == 0; });
    if (!vaults.empty() && random() % 4 == 0) {
      vaults[random() % vaults.size()].node = 0;  // it moved
    }
    const auto decision = planRestore(vaults, shape);
    if (!decision.plan) {
      continue;
    }
    ++planned;
    std::vector<Row> sends, receives;
    for (int rank = 0; rank < world; ++rank) {
      std::vector<Row> own;
      for (const Transfer& transfer : transfersOf(*decision.plan, rank)) {
        ASSERT_NE(transfer.sender, transfer.receiver);
        ASSERT_EQ(decision.plan->vaults[static_cast<size_t>(transfer.vault)].node,
                  shape.nodeOf(transfer.sender))
            << "the sender cannot read it";
        own.push_back(rowOf(transfer));
        (transfer.sender == rank ? sends : receives).push_back(own.back());
      }
      ASSERT_TRUE(std::is_sorted(own.begin(), own.end()));
      const auto same = [](const Row& a, const Row& b) {
        return std::get<0>(a) == std::get<0>(b) && std::get<1>(a) == std::get<1>(b);
      };
      ASSERT_EQ(std::adjacent_find(own.begin(), own.end(), same), own.end())
          << "two messages to one receiver have one tag";
    }
    std::sort(sends.begin(), sends.end());
    std::sort(receives.begin(), receives.end());
    ASSERT_EQ(sends, receives);
  }
  EXPECT_GT(planned, 100);
}

}  // namespace plan_test
}  // namespace reft
