#include "snapshot/restore/agreement.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/cut.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "snapshot/vault/writer.h"

namespace reft {
namespace {

constexpr uint64_t kInc = 5;

// A job of one sharding group over all ranks; `copies` further shards per rank.
std::vector<VaultSummary> replicas(int world, int64_t step, uint32_t copies,
                                   uint64_t incarnation = kInc) {
  std::vector<VaultSummary> vaults;
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.push_back(rank);
  }
  for (int rank = 0; rank < world; ++rank) {
    GroupSummary group{"g", ranks, {}, 99};
    for (uint32_t k = 0; k <= copies; ++k) {
      group.shards.push_back((static_cast<uint32_t>(rank) + k) % static_cast<uint32_t>(world));
    }
    std::sort(group.shards.begin(), group.shards.end());
    vaults.push_back({rank, rank / 2, {{0, step, incarnation, 0, {group}}}});
  }
  return vaults;
}

void addStep(std::vector<VaultSummary>& vaults, const std::vector<VaultSummary>& more) {
  for (size_t i = 0; i < vaults.size(); ++i) {
    vaults[i].slots.insert(vaults[i].slots.end(), more[i].slots.begin(), more[i].slots.end());
  }
}

TEST(AgreeOnRestore, NothingSealedMeansNoPlanAndNoComplaint) {
  EXPECT_FALSE(agreeOnRestore({}, 4).plan);
  EXPECT_TRUE(agreeOnRestore({{0, 0, {}}, {1, 0, {}}}, 2).rejected.empty());
}

TEST(AgreeOnRestore, SaysThatThereAreFewerRanksThanBefore) {
  for (const auto& vaults :
       {replicas(2, 10, 0), std::vector<VaultSummary>{replicas(2, 10, 0)[0]}}) {
    const Agreement result = agreeOnRestore(vaults, 1);
    EXPECT_FALSE(result.plan);
    ASSERT_EQ(result.rejected.size(), 1u);
    EXPECT_NE(result.rejected[0].find("made by at least 2 ranks, and there are 1 now"),
              std::string::npos)
        << result.rejected[0];
  }
}

TEST(AgreeOnRestore, TakesTheNewestStepThatEverybodyHas) {
  auto vaults = replicas(4, 10, 0);
  addStep(vaults, replicas(4, 11, 0));
  const Agreement result = agreeOnRestore(vaults, 4);
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->step, 11);
  EXPECT_EQ(result.plan->incarnation, kInc);
  EXPECT_EQ(result.plan->node_of_rank, std::vector<int>({0, 0, 1, 1}));
  EXPECT_TRUE(result.plan->donor.empty());
  EXPECT_EQ(result.plan->holders.at("g"), (std::vector<std::vector<int>>{{0}, {1}, {2}, {3}}));
  EXPECT_TRUE(result.rejected.empty());
}

TEST(AgreeOnRestore, FallsBackToAnOlderStepAndSaysWhy) {
  auto vaults = replicas(4, 10, 0);
  addStep(vaults, replicas(4, 11, 0));
  vaults[2].slots.pop_back();  // killed before it sealed step 11
  const Agreement result = agreeOnRestore(vaults, 4);
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->step, 10);
  ASSERT_EQ(result.rejected.size(), 1u);
  EXPECT_EQ(result.rejected[0], "step 11: rank 2 has not sealed it");
}

TEST(AgreeOnRestore, DoesNotRebuildARankThatIsThereFromACopy) {
  auto vaults = replicas(4, 11, 1);
  vaults[2].slots.clear();
  EXPECT_FALSE(agreeOnRestore(vaults, 4).plan);
}

TEST(AgreeOnRestore, RebuildsALostRankFromTheCopyOfItsShard) {
  auto vaults = replicas(4, 11, 1);
  vaults.erase(vaults.begin() + 2);
  const Agreement result = agreeOnRestore(vaults, 4);
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->node_of_rank, std::vector<int>({0, 0, -1, 1}));
  EXPECT_EQ(result.plan->donor, (std::map<int, int>{{2, 0}}));
  EXPECT_EQ(result.plan->holders.at("g")[2], std::vector<int>({1}));
}

TEST(AgreeOnRestore, WithoutCopiesALostShardIsNamed) {
  auto vaults = replicas(4, 11, 0);
  vaults.erase(vaults.begin() + 2);
  const Agreement result = agreeOnRestore(vaults, 4);
  EXPECT_FALSE(result.plan);
  EXPECT_EQ(result.rejected.at(0), "step 11: shard 2 of group g is not sealed anywhere");
}

TEST(AgreeOnRestore, ArcSurvivesEveryLossThatLeavesEveryShardSomewhere) {
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
    EXPECT_EQ(agreeOnRestore(vaults, 5).plan.has_value(), covered) << "lost set " << lost;
  }
}

TEST(AgreeOnRestore, RefusesReplicasThatDiffer) {
  auto vaults = replicas(3, 11, 0);
  vaults[1].slots[0].groups[0].digest = 98;
  const Agreement result = agreeOnRestore(vaults, 3);
  EXPECT_FALSE(result.plan);
  EXPECT_NE(result.rejected.at(0).find("silent data corruption"), std::string::npos);
}

// A vault records the digests of 64 groups; a further one is 0 = not known, which is not a
// difference.
TEST(AgreeOnRestore, AnUnknownDigestIsNoDifference) {
  auto vaults = replicas(3, 11, 0);
  vaults[0].slots[0].groups[0].digest = 0;
  EXPECT_TRUE(agreeOnRestore(vaults, 3).plan);
  vaults = replicas(3, 11, 0);
  vaults[1].slots[0].groups[0].digest = 0;
  EXPECT_TRUE(agreeOnRestore(vaults, 3).plan);
  vaults[2].slots[0].groups[0].digest = 98;
  EXPECT_FALSE(agreeOnRestore(vaults, 3).plan) << "the two that are known differ";
}

TEST(AgreeOnRestore, RefusesMembersThatDisagreeAboutTheirGroup) {
  auto vaults = replicas(3, 11, 0);
  vaults[1].slots[0].groups[0].ranks = {0, 1};
  EXPECT_FALSE(agreeOnRestore(vaults, 3).plan);
}

TEST(AgreeOnRestore, NeverMixesIncarnations) {
  auto vaults = replicas(2, 11, 0, 1);
  vaults[1].slots[0].incarnation = 2;
  EXPECT_FALSE(agreeOnRestore(vaults, 2).plan);
  addStep(vaults, replicas(2, 9, 0, 1));
  ASSERT_TRUE(agreeOnRestore(vaults, 2).plan);
  EXPECT_EQ(agreeOnRestore(vaults, 2).plan->step, 9);
}

TEST(AgreeOnRestore, TakesTheLowerNodeWhenTwoShowTheSameRank) {
  auto vaults = replicas(2, 11, 0);
  vaults.push_back(vaults[0]);
  vaults.back().node = 7;
  std::mt19937 random(1);
  for (int i = 0; i < 10; ++i) {
    std::shuffle(vaults.begin(), vaults.end(), random);
    EXPECT_EQ(agreeOnRestore(vaults, 2).plan->node_of_rank, std::vector<int>({0, 0}));
  }
}

TEST(AgreeOnRestore, RanksOutsideOfTheWorldCountForNothing) {
  auto vaults = replicas(2, 11, 0);
  vaults.push_back({9, 0, {{0, 12, kInc, 0, {}}}});
  vaults.push_back({-1, 0, {{0, 12, kInc, 0, {}}}});
  ASSERT_TRUE(agreeOnRestore(vaults, 2).plan);
  EXPECT_EQ(agreeOnRestore(vaults, 2).plan->step, 11);
}

TEST(AgreeOnRestore, PrivateRanksNeedTheirOwnVault) {
  std::vector<VaultSummary> vaults = {{0, 0, {{0, 4, kInc, 0, {}}}}, {1, 0, {{0, 4, kInc, 0, {}}}}};
  EXPECT_TRUE(agreeOnRestore(vaults, 2).plan);
  vaults.pop_back();
  EXPECT_FALSE(agreeOnRestore(vaults, 2).plan);
}

TEST(AgreeOnRestore, RefusesPointsOfTheProgramThatDoNotBelongTogether) {
  auto vaults = replicas(3, 11, 0);
  vaults[0].slots[0].cut = 40;
  vaults[1].slots[0].cut = 2;
  vaults[2].slots[0].cut = 0 - uint64_t{42};
  EXPECT_TRUE(agreeOnRestore(vaults, 3).plan);
  vaults[1].slots[0].cut = 3;
  const Agreement result = agreeOnRestore(vaults, 3);
  EXPECT_FALSE(result.plan);
  EXPECT_NE(result.rejected.at(0).find("different points of the program"), std::string::npos);
  vaults[2].slots[0].cut = kUnknownCut;
  EXPECT_TRUE(agreeOnRestore(vaults, 3).plan);
}

TEST(Inventory, RoundTripKeepsEverything) {
  auto vaults = replicas(3, 11, 1);
  vaults[1].slots[0].cut = kUnknownCut;
  vaults[0].slots[0].groups[0].digest = ~uint64_t{0};
  const auto again =
      parseInventories({inventoryJson({vaults[0]}), inventoryJson({vaults[1], vaults[2]})});
  EXPECT_EQ(inventoryJson(again), inventoryJson(vaults));
}

TEST(Inventory, RejectsOtherText) {
  for (const char* text :
       {"", "{", "3", "[3]", "[{}]", "{\"rank\":0}", "[{\"rank\":0,\"node\":0,\"slots\":[[1]]}]",
        "[{\"rank\":4e26,\"node\":0,\"slots\":[]}]",
        "[{\"rank\":4294967296,\"node\":0,\"slots\":[]}]"}) {
    EXPECT_THROW(parseInventories({text}), Corruption) << text;
  }
}

class SummarizeVerified : public testing::Test {
 protected:
  static constexpr uint64_t kChunk = 4096;
  SummarizeVerified() : vault_(Vault::create({"job", 0, 2}, 2, 64)) {
    table_ = buildTable(0, 2,
                        {{"shared", "uint8", {4 * kChunk}, 4 * kChunk, kChunk, 0, false},
                         {"mine", "uint8", {kChunk}, kChunk, kChunk, -1, false}},
                        {{"g", {0, 1}}}, "arc", 1, kChunk);
    const std::string json = table_.toJson();
    const uint64_t chunks = table_.payload_bytes / kChunk;
    vault_->reserveSlot(0, json.size(), 100, chunks, table_.payload_bytes);
    vault_->beginSlot(0, 3, kInc, json, hashBytes(json.data(), json.size()), kChunk,
                      table_.payload_bytes, chunks);
    vault_->putObjects(0, "o");
    for (uint64_t i = 0; i < chunks; ++i) {
      vault_->chunkHashes(0)[i] = hashBytes(vault_->payload(0) + i * kChunk, kChunk);
    }
    vault_->sealSlot(0, std::vector<uint64_t>{42}, 1);
  }
  void damage(int32_t region, uint32_t shard) {
    for (const Piece& piece : table_.pieces) {
      if (piece.region == static_cast<uint32_t>(region) && piece.shard == shard) {
        vault_->payload(0)[piece.payload_offset + 5] ^= std::byte{1};
        return;
      }
    }
    FAIL() << "no such piece";
  }
  std::vector<SlotSummary> summarize() {
    return summarizeVerified(VaultReader(vault_->fd()), faults_);
  }

  std::unique_ptr<Vault> vault_;
  SnapshotTable table_;
  std::vector<std::string> faults_;
};

TEST_F(SummarizeVerified, IntactVaultOffersAllOfItsShards) {
  const auto slots = summarize();
  ASSERT_EQ(slots.size(), 1u);
  EXPECT_EQ(slots[0].step, 3);
  ASSERT_EQ(slots[0].groups.size(), 1u);
  EXPECT_EQ(slots[0].groups[0].shards, std::vector<uint32_t>({0, 1}));
  EXPECT_EQ(slots[0].groups[0].digest, 42u);
  EXPECT_TRUE(faults_.empty());
}

TEST_F(SummarizeVerified, DamagedShardIsLeftOutAndNamed) {
  damage(0, 1);
  const auto slots = summarize();
  ASSERT_EQ(slots.size(), 1u);
  EXPECT_EQ(slots[0].groups[0].shards, std::vector<uint32_t>({0}));
  ASSERT_EQ(faults_.size(), 1u);
  EXPECT_NE(faults_[0].find("rank 0 step 3"), std::string::npos);
}

TEST_F(SummarizeVerified, DamagedPrivatePartTakesTheSlotAway) {
  damage(1, 0);
  EXPECT_TRUE(summarize().empty());
  EXPECT_EQ(faults_.size(), 1u);
}

}  // namespace
}  // namespace reft
