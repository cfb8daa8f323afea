#include "snapshot/restore/inventory.h"

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
#include "tests/unit/snapshot/restore/replicas.h"

namespace reft {
namespace inventory_test {

TEST(Inventory, RoundTripKeepsEverything) {
  auto vaults = replicas(3, 11, 1);
  vaults[1].slots[0].cut = kUnknownCut;
  vaults[2].slots[0].only_here = "o0.p1";
  vaults[2].slots[0].indivisible = "o0.p1.exp_avg";
  vaults[2].slots[0].splits = 17;
  vaults[0].slots[0].groups[0].digest = ~uint64_t{0};
  const auto again =
      parseInventories({inventoryJson({vaults[0]}), inventoryJson({vaults[1], vaults[2]})});
  EXPECT_EQ(inventoryJson(again), inventoryJson(vaults));
}

TEST(Inventory, RejectsOtherText) {
  for (
      const char* text :
      {"", "{", "3", "[]", "{}", "{\"groups\":[],\"vaults\":[3]}",
       "{\"groups\":[],\"vaults\":[{\"rank\":0,\"node\":0,\"writer\":1,\"resumed\":-1,\"copy\":"
       "false,\"slots\":[["
       "1]]}]}",
       "{\"groups\":[],\"vaults\":[{\"rank\":0,\"node\":0,\"writer\":1,\"resumed\":-1,\"copy\":"
       "false,"
       "\"slots\":[[0,1,2,3,\"none\",[]]]}]}",
       R"({"groups":[["g",[],[]]],"vaults":[{"rank":0,"node":0,"writer":1,"resumed":-1,"copy":false,"world":2,"since":7,"slots":[[0,1,2,3,"none",[[0,[],0,[]]],""]]}]})",
       R"({"groups":[["g",[],[]]],"vaults":[{"rank":0,"node":0,"writer":1,"resumed":-1,"copy":false,"world":2,"since":7,"slots":[[0,1,2,3,"none",[[1,[],0,0,[]]],""]]}]})",
       "{\"groups\":[],\"vaults\":[{\"rank\":4e26,\"node\":0,\"writer\":1,\"resumed\":-1,\"copy\":"
       "false,\"slots\":"
       "[]}]}",
       "{\"groups\":[],\"vaults\":[{\"rank\":4294967296,\"node\":0,\"writer\":1,\"resumed\":-1,"
       "\"copy\":false,"
       "\"slots\":[]}]}"}) {
    EXPECT_THROW(parseInventories({text}), Corruption) << text;
  }
}

TEST(Inventory, RejectsGroupsThatAreNone) {
  for (const char* groups : {
           R"([3,[[0,0,1]],[]])",
           R"(["g",[[0,0,1]]])",
           R"(["g",[0],[]])",
           R"(["g",null,[]])",
           R"(["g",{},[]])",
           R"(["g",[],null])",
           R"(["g",{"a":[0,3,1]},[]])",
           R"(["g",[[0,3]],[]])",
           R"(["g",[[0,3,1,7]],[]])",
           R"(["g",[{"a":0,"b":3,"c":1}],[]])",
           R"(["g",[[3,0,1]],[]])",
           R"(["g",[[0,4,3]],[]])",
           R"(["g",[[0,4,0]],[]])",
           R"(["g",[[-1,4,1]],[]])",
           R"(["g",[[0,4,1],[4,5,1]],[]])",
           R"(["g",[[0,4,1]],[[2,2,1],[1,1,1]]])",
           R"(["g",[[0,2147483647,1]],[]])",
           R"(["g",[[0,16777000,1]],[],[]],["h",[[0,400,1]]])",
           R"(["g",[[0,16777000,1]],[[0,400,1]]])",
       }) {
    const std::string text = std::string(R"({"groups":[)") + groups + R"(],"vaults":[]})";
    EXPECT_THROW(parseInventories({text}), Corruption) << text;
  }
}

TEST(Inventory, RanksUpToTheHighestNumberAreRead) {
  for (const char* runs : {"[[2147483647,2147483647,1]]", "[[147483647,2147483647,1000000000]]"}) {
    const std::string text =
        std::string(R"({"groups":[["g",)") + runs +
        R"(,[]]],"vaults":[{"rank":0,"node":0,"writer":1,"resumed":-1,"copy":false,"world":2,"since":7,"slots":[[0,1,2,3,"none",[[0,[],0,0,[]]],"","",0]]}]})";
    const auto vaults = parseInventories({text});
    EXPECT_EQ(vaults[0].slots[0].groups[0].shared->ranks.back(), 2147483647) << text;
  }
}

TEST(Inventory, TextsTogetherAreAsLargeAsOne) {
  std::vector<std::string> texts;
  for (int i = 0; i < 2; ++i) {
    texts.push_back(R"({"groups":[["g)" + std::to_string(i) +
                    R"(",[[0,9000000,1]],[]]],"vaults":[]})");
  }
  EXPECT_NO_THROW(parseInventories({texts[0], texts[0]}));
  EXPECT_THROW(parseInventories(texts), Corruption);
}

TEST(Inventory, NamesTheRanksOfAGroupOnce) {
  const std::string text = inventoryJson(replicas(8, 11, 1));
  const std::string ranks = "[[0,7,1]]";
  const size_t first = text.find(ranks);
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.find(ranks, first + 1), std::string::npos) << text;
}

// Any ranks, in runs of any steps, come back.
TEST(Inventory, KeepsTheRanksOfEveryGroup) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<int> ranks;
    for (int rank = static_cast<int>(random() % 3); ranks.size() < random() % 12 + 1;) {
      ranks.push_back(rank);
      rank += 1 + static_cast<int>(random() % 2 * (random() % 4));
    }
    const SharedGroup group{"g", ranks, {ranks.begin(), ranks.end()}};
    const auto shared = std::make_shared<const SharedGroup>(group);
    const std::string text = inventoryJson({{0, 0, {{0, 1, kInc, 0, {{shared, {0}, 1, 2}}}}}});
    EXPECT_EQ(*parseInventories({text})[0].slots[0].groups[0].shared, group) << text;
  }
  for (const int step : {1, 8}) {
    SharedGroup group{"g", {}};
    for (int rank = 5; rank < 100'000; rank += step) {
      group.ranks.push_back(rank);
    }
    const auto info = std::make_shared<const SharedGroup>(group);
    EXPECT_LT(inventoryJson({{0, 0, {{0, 1, kInc, 0, {{info, {}, 1, 2}}}}}}).size(), 200u);
  }
}

TEST(Inventory, VaultsOfSeveralNodesShareTheObjectOfAGroup) {
  const auto vaults = replicas(3, 11, 1);
  const auto again = parseInventories({inventoryJson({vaults[0]}), inventoryJson({vaults[2]})});
  EXPECT_EQ(again[0].slots[0].groups[0].shared, again[1].slots[0].groups[0].shared);
}

class SummarizeVerified : public testing::Test {
 protected:
  static constexpr uint64_t kChunk = 4096;
  SummarizeVerified() : vault_(Vault::create({"job", 0, 2}, 2, 64)) {
    table_ = buildTable(0, 2,
                        {{"shared", "uint8", {4 * kChunk}, 4 * kChunk, kChunk, 0, false},
                         {"mine", "uint8", {kChunk}, kChunk, kChunk, -1}},
                        {{"g", {0, 1}}}, "arc", {{0, 1}}, kChunk);
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
  EXPECT_EQ(slots[0].protection, "arc");
  EXPECT_EQ(slots[0].only_here, "mine");
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

// Of three replicas, the second's own shard and its parity.
TEST(SummarizeVerifiedParity, IsAPartOfItsOwnThatDamageTakesAway) {
  constexpr uint64_t kChunk = 4096;
  const GroupInfo group{"g", {0, 1, 2}, {{0, 2, 1}}};
  const SnapshotTable table =
      buildTable(1, 3, {{"r", "uint8", {9 * 4096}, 9 * kChunk, kChunk, 0, false}}, {group}, "aec",
                 {{1, 4}}, kChunk);
  const auto vault = Vault::create({"job", 1, 3}, 2, 64);
  const std::string json = table.toJson();
  const uint64_t chunks = (table.payload_bytes + kChunk - 1) / kChunk;
  vault->reserveSlot(0, json.size(), 100, chunks, table.payload_bytes);
  vault->beginSlot(0, 3, kInc, json, hashBytes(json.data(), json.size()), kChunk,
                   table.payload_bytes, chunks);
  vault->putObjects(0, "o");
  for (uint64_t i = 0; i < chunks; ++i) {
    vault->chunkHashes(0)[i] = hashBytes(vault->payload(0) + i * kChunk,
                                         std::min(kChunk, table.payload_bytes - i * kChunk));
  }
  vault->sealSlot(0, std::vector<uint64_t>{42}, 1);
  const auto summarize = [&] {
    std::vector<std::string> faults;
    return summarizeVerified(VaultReader(vault->fd()), faults);
  };
  auto slots = summarize();
  ASSERT_EQ(slots.size(), 1u);
  EXPECT_EQ(slots[0].groups[0].shards, std::vector<uint32_t>({1, 4}));
  EXPECT_EQ(slots[0].groups[0].parity_set, group.sets[0]);
  const auto again = parseInventories({inventoryJson({{1, 0, slots}})});
  EXPECT_EQ(again[0].slots[0].groups[0].shards, std::vector<uint32_t>({1, 4}));
  EXPECT_EQ(again[0].slots[0].groups[0].parity_set, group.sets[0]);
  vault->payload(0)[table.parities[0].payload_offset] ^= std::byte{1};
  slots = summarize();
  ASSERT_EQ(slots.size(), 1u);
  EXPECT_EQ(slots[0].groups[0].shards, std::vector<uint32_t>({1}));
}

TEST(Inventory, RefusesAParitySetThatTheGroupCannotHave) {
  std::vector<VaultSummary> vaults = replicas(3, 11, 0);
  vaults[0].slots[0].groups[0].parity_set = {0, 2};
  const std::string text = inventoryJson(vaults);
  ASSERT_NE(text.find("[0,2]]"), std::string::npos) << text;
  EXPECT_NO_THROW(parseInventories({text}));
  for (const char* set : {"[0,3]", "[0,0]", "[-1,0]", "7", "[[0,1]]"}) {
    std::string wrong = text;
    wrong.replace(wrong.find("[0,2]]"), 5, set);
    EXPECT_THROW(parseInventories({wrong}), Corruption) << set;
  }
}

}  // namespace inventory_test
}  // namespace reft
