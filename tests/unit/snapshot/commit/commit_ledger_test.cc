#include "snapshot/commit/commit_ledger.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/cut.h"

namespace reft {
namespace commit_ledger_test {

constexpr uint64_t kInc = 7;
using Action = CommitLedger::Action;

TEST(CommitLedger, CommitsWhenEveryRankSealed) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  EXPECT_TRUE(ledger.vote(0, {5, kInc}, {true, 7}).empty());
  EXPECT_EQ(ledger.open().size(), 1u);
  const auto actions = ledger.vote(1, {5, kInc}, {true, 0 - uint64_t{7}});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_EQ(ledger.newestCommitted(), (CommitKey{5, kInc}));
  EXPECT_TRUE(ledger.open().empty());
}

TEST(CommitLedger, AbortsWhenProgramPointsDoNotBelongTogether) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, {true, 7});
  const auto actions = ledger.vote(1, {5, kInc}, {true, 0 - uint64_t{9}});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_FALSE(actions[0].yes);
  EXPECT_NE(actions[0].cut, 0u);
  EXPECT_EQ(ledger.counters().inconsistent, 1u);
  EXPECT_EQ(ledger.newestCommitted(), std::nullopt);
}

TEST(CommitLedger, ACutThatARankCannotKnowIsNotChecked) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, {true, kUnknownCut});
  const auto actions = ledger.vote(1, {5, kInc}, {true, 8});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
}

TEST(CommitLedger, AbortsWhenReplicasDoNotAgreeAndHasAllRanksPlan) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, {true, 7, 0, 30});
  auto actions = ledger.vote(1, {5, kInc}, {true, 0 - uint64_t{7}, 0, 31});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_FALSE(actions[0].yes);
  EXPECT_EQ(actions[0].cut, 0u);
  EXPECT_NE(actions[0].replicas, 0u);
  EXPECT_TRUE(actions[0].plan_anew);
  EXPECT_EQ(ledger.counters().parted, 1u);
  actions = ledger.vote(1, {5, kInc}, {true, 0, 0, 0});  // a rank that lost the answer
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kAnswer);
  EXPECT_NE(actions[0].replicas, 0u);
  EXPECT_TRUE(actions[0].plan_anew);
}

TEST(CommitLedger, PassesOnThatAVoteAskedForAPlan) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, {true, 0, 0, 4, true});
  auto actions = ledger.vote(1, {5, kInc}, {true, 0, 0, 0 - uint64_t{4}});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_TRUE(actions[0].plan_anew);
  actions = ledger.vote(0, {6, kInc}, {false, 0, 0, 0, true});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_FALSE(actions[0].yes);
  EXPECT_TRUE(actions[0].plan_anew);
  EXPECT_EQ(ledger.counters().parted, 0u);
}

TEST(CommitLedger, AbortsAtTheFirstDroppedVote) {
  CommitLedger ledger;
  ledger.expect(kInc, 3, false);
  const auto actions = ledger.vote(2, {5, kInc}, {false, 0});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_FALSE(actions[0].yes);
  const auto late = ledger.vote(0, {5, kInc}, {true, 0});
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].kind, Action::kAnswer);
  EXPECT_EQ(late[0].rank, 0);
  EXPECT_FALSE(late[0].yes);
}

TEST(CommitLedger, AnswersRepeatedVoteWithTheSameOutcome) {
  CommitLedger ledger;
  ledger.expect(kInc, 1, false);
  ledger.vote(0, {5, kInc}, {true, 0});
  const auto again = ledger.vote(0, {5, kInc}, {false, 0});  // even if it says something else now
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].kind, Action::kAnswer);
  EXPECT_TRUE(again[0].yes);
  EXPECT_EQ(ledger.counters().repeated, 1u);
}

TEST(CommitLedger, CountsOneRankOnce) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, {true, 0});
  EXPECT_TRUE(ledger.vote(0, {5, kInc}, {true, 0}).empty());
}

TEST(CommitLedger, KeepsIncarnationsApart) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.expect(kInc + 1, 2, false);
  ledger.vote(0, {5, kInc}, {true, 0});
  EXPECT_TRUE(ledger.vote(1, {5, kInc + 1}, {true, 0}).empty());
}

TEST(CommitLedger, CountsVotesThatCameBeforeTheWorldWasKnown) {
  CommitLedger ledger;
  EXPECT_TRUE(ledger.vote(0, {5, kInc}, {true, 0}).empty());
  const auto actions = ledger.expect(kInc, 1, false);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_THROW(ledger.expect(kInc, 0, false), InvalidArgument);
}

TEST(CommitLedger, SeveralNodesWaitForTheOutcomeOfTheJob) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, true);
  ledger.vote(4, {5, kInc}, {true, 9});
  auto actions = ledger.vote(5, {5, kInc}, {true, 8});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kNodeVote);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_EQ(actions[0].cut, 17u);
  actions = ledger.vote(4, {5, kInc},
                        {true, 9});  // after a reconnect: the node's vote may have been lost
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kNodeVote);
  actions = ledger.jobOutcome({5, kInc}, {false});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_FALSE(actions[0].yes);
  actions = ledger.jobOutcome({5, kInc}, {true});  // a second, contradicting one does not change it
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_FALSE(actions[0].yes);
}

TEST(CommitLedger, AStepIsDecidedOnceItHasItsOutcome) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, true);
  EXPECT_FALSE(ledger.isDecided({5, kInc}));
  ledger.vote(0, {5, kInc}, {false, 0});
  EXPECT_FALSE(ledger.isDecided({5, kInc})) << "the node has voted, and the job has not decided";
  ledger.jobOutcome({5, kInc}, {false, 0});
  EXPECT_TRUE(ledger.isDecided({5, kInc}));
  EXPECT_FALSE(ledger.isDecided({5, kInc + 1}));
  EXPECT_FALSE(ledger.isDecided({6, kInc}));
}

TEST(CommitLedger, TakesBackVotesThatNothingDependsOnYet) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, true);
  ledger.vote(4, {5, kInc}, {true, 9});
  ledger.vote(5, {5, kInc}, {true, 8});  // the node has voted
  ledger.vote(4, {6, kInc}, {true, 9, 3});
  ledger.vote(4, {6, kInc - 1}, {true, 9});
  EXPECT_TRUE(ledger.takeBack(kInc, {5}).empty());
  const auto taken = ledger.takeBack(kInc, {4, 5});
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].rank, 4);
  EXPECT_EQ(taken[0].key, (CommitKey{6, kInc}));
  EXPECT_EQ(taken[0].held.proposal, 3);
  EXPECT_TRUE(ledger.vote(5, {6, kInc}, {true, 8}).empty()) << "that of rank 4 is missing again";
  const auto actions = ledger.vote(4, {6, kInc}, taken[0].held);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kNodeVote);
  EXPECT_EQ(actions[0].cut, 17u);
}

TEST(CommitLedger, VaultOfAnsweredRankCompletesAVoteAfterAnAgentRestart) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vaultHolds(0, {{{4, kInc}, {true}},
                        {{5, kInc}, {true}},
                        {{3, kInc - 1}, {true}}});  // told the outcome by the earlier agent
  const auto actions = ledger.vote(1, {5, kInc}, {true, 0});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
}

TEST(CommitLedger, LaterVoteOfARankThatLacksTheStepAbortsIt) {
  CommitLedger ledger([](int, const CommitKey& key) { return CommitLedger::Held{key.step == 4}; });
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {4, kInc}, {true, 0});
  ledger.vote(0, {5, kInc}, {true, 0});
  const auto actions = ledger.vote(1, {6, kInc}, {true, 0});
  ASSERT_EQ(actions.size(), 2u);
  EXPECT_EQ(actions[0].key.step, 4);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_EQ(actions[1].key.step, 5);
  EXPECT_FALSE(actions[1].yes);
  EXPECT_EQ(ledger.counters().inferred, 2u);
}

TEST(CommitLedger, InfersNothingFromAVaultThatIsNotKnown) {
  CommitLedger ledger([](int, const CommitKey&) { return std::nullopt; });
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, {true, 0});
  EXPECT_TRUE(ledger.vote(1, {6, kInc}, {true, 0}).empty());
}

TEST(CommitLedger, ForgetsTheOldestInsteadOfGrowing) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  for (int64_t step = 0; step < 10000; ++step) {
    ledger.vote(0, {step, kInc}, {true, 0});
  }
  EXPECT_LE(ledger.open().size(), CommitLedger::kRemembered);
  for (uint64_t inc = 100; inc < 200; ++inc) {
    ledger.vote(0, {1, inc}, {true, 0});
  }
  EXPECT_LE(ledger.open().size(), CommitLedger::kRemembered * CommitLedger::kIncarnations);
}

}  // namespace commit_ledger_test
}  // namespace reft
