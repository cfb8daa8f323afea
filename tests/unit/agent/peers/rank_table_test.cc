// Which vaults an agent keeps when the number of ranks changes.
#include "agent/peers/rank_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "snapshot/state/table.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/writer.h"

namespace reft::agent {
namespace rank_table_test {

constexpr uint64_t kChunk = 4096;
constexpr int kRank = 1;

// The vault of one rank of a job with `world` ranks.
class RankVault {
 public:
  explicit RankVault(int world)
      : world_(world), vault_(Vault::create({"job", kRank, world}, 2, 64)) {}

  int world() const { return world_; }
  UniqueFd fd() const { return duplicated(vault_->fd()); }

  void seal(uint32_t slot, int64_t step) {
    const SnapshotTable table =
        buildTable(kRank, world_, {{"mine", "uint8", {96}, 96, 96, -1, false, {}, true}}, {},
                   "none", {}, kChunk);
    const std::string json = table.toJson();
    vault_->reserveSlot(slot, json.size(), 64, 1, table.payload_bytes);
    vault_->beginSlot(slot, step, 1, json, hashBytes(json.data(), json.size()), kChunk,
                      table.payload_bytes, 1);
    vault_->putObjects(slot, "small state");
    vault_->chunkHashes(slot)[0] = hashBytes(vault_->payload(slot), table.payload_bytes);
    vault_->sealSlot(slot, {}, 1);
  }

  // Its process has resumed at a step.
  void resumed(int64_t step) {
    vault_->stats().restored_step.store(static_cast<uint64_t>(step));
    vault_->stats().restore_ns.store(5);
  }

 private:
  static UniqueFd duplicated(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 3)); }

  int world_;
  std::unique_ptr<Vault> vault_;
};

class RankTableTest : public testing::Test {
 protected:
  // A new attempt, whose rank has this vault.
  RankState& start(const RankVault& vault, int resumes_world = 0) {
    if (RankState* const before = table_.find(kRank); before != nullptr) {
      before->alive = false;
      before->connection = 0;
    }
    Hello hello;
    hello.is_rank = true;
    hello.job = "job";
    hello.rank = kRank;
    hello.pid = 5;
    hello.world = vault.world();
    hello.incarnation = ++incarnation_;
    PeerProcess process;
    RankState& rank = table_.join(hello, process, incarnation_);
    table_.putVault(rank, {kRank, 0, resumes_world}, vault.fd());
    return rank;
  }

  RankTable table_{"job", ""};
  uint64_t incarnation_ = 0;
};

TEST_F(RankTableTest, WhatTheJobHasResumedFromIsDroppedOnceAStepIsCommitted) {
  RankVault four(4), three(3);
  four.seal(0, 8);
  start(four);
  RankState& rank = start(three, 4);
  ASSERT_NE(rank.vaultOf(4), nullptr) << "set aside";
  three.resumed(8);
  three.seal(0, 9);
  ASSERT_NE(rank.vaultOf(4), nullptr) << "until a step is committed";
  table_.dropSetAside();
  EXPECT_EQ(rank.vaultOf(4), nullptr);
  EXPECT_EQ(rank.vaultOf(3), &rank.vault);
}

TEST_F(RankTableTest, WhatTheScriptDidNotTakeStaysAndIsNotOfferedToAsManyAgain) {
  RankVault four(4), three(3);
  four.seal(0, 8);
  start(four);
  RankState& rank = start(three, 4);
  three.seal(0, 1);  // from its beginning
  table_.dropSetAside();
  ASSERT_NE(rank.vaultOf(4), nullptr);
  EXPECT_TRUE(rank.vaultOf(4)->refused_by.contains(3));
  EXPECT_TRUE(rank.vault.refused_by.contains(4)) << "nor is the other one to as many as there were";
}

// Two lines of one job: what the smaller one has, and the larger one has passed.
TEST_F(RankTableTest, ASmallerJobsVaultGoesOnceTheLargerJobHasPassedIt) {
  RankVault four(4), three(3);
  four.seal(0, 8);
  start(four);
  three.seal(0, 6);
  three.seal(1, 7);
  start(three, 4);
  RankState& rank = start(four);
  ASSERT_NE(rank.vaultOf(3), nullptr);
  table_.dropSetAside();
  ASSERT_NE(rank.vaultOf(3), nullptr) << "the rank has not resumed from its own";
  four.resumed(8);
  table_.dropSetAside();
  EXPECT_EQ(rank.vaultOf(3), nullptr);
}

TEST_F(RankTableTest, ASmallerJobsVaultStaysWhileItIsAhead) {
  RankVault four(4), three(3);
  four.seal(0, 8);
  start(four);
  three.seal(0, 6);
  three.seal(1, 9);
  start(three, 4);
  RankState& rank = start(four);
  four.resumed(8);
  table_.dropSetAside();
  EXPECT_NE(rank.vaultOf(3), nullptr);
}

TEST_F(RankTableTest, ALargerJobsVaultStaysWhereASmallerOneGoesOnWithItsOwn) {
  RankVault four(4), three(3);
  four.seal(0, 2);
  three.seal(0, 8);
  start(three);
  start(four, 3);
  RankState& rank = start(three);
  three.resumed(8);
  table_.dropSetAside();
  EXPECT_NE(rank.vaultOf(4), nullptr) << "its other ranks may be needed again";
}

TEST_F(RankTableTest, AVaultOfAnotherRankOrJobIsRefusedAndTheOldOneStays) {
  RankVault four(4);
  four.seal(0, 8);
  RankState& rank = start(four);
  const auto other = Vault::create({"job", kRank + 1, 4}, 2, 64);
  EXPECT_ANY_THROW(
      table_.putVault(rank, {kRank, 0, 0}, UniqueFd(::fcntl(other->fd(), F_DUPFD_CLOEXEC, 3))));
  const auto foreign = Vault::create({"another", kRank, 4}, 2, 64);
  EXPECT_ANY_THROW(
      table_.putVault(rank, {kRank, 0, 0}, UniqueFd(::fcntl(foreign->fd(), F_DUPFD_CLOEXEC, 3))));
  EXPECT_ANY_THROW(table_.putVault(rank, {kRank, 0, 0}, UniqueFd()));
  ASSERT_NE(rank.vaultOf(4), nullptr);
  EXPECT_EQ(table_.sealed(rank).size(), 1u);
}

}  // namespace rank_table_test
}  // namespace reft::agent
