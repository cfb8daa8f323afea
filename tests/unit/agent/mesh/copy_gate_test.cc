#include "agent/mesh/copy_gate.h"

#include <gtest/gtest.h>

namespace reft::agent {
namespace copy_gate_test {

constexpr int64_t kPatience = 10, kLongest = 100;
constexpr uint64_t kIncarnation = 3;
using State = CopyGate::State;

class CopyGateTest : public testing::Test {
 protected:
  void SetUp() override { gate_.expect({0, 1}, kIncarnation); }
  static CopyGate::Vote vote(int rank, int64_t step, bool sealed = true,
                             uint64_t incarnation = kIncarnation) {
    return {rank, {step, incarnation}, {sealed, 4, 5, 6, false}};
  }
  CopyGate gate_{kPatience, kLongest};
};

TEST_F(CopyGateTest, AVoteWaitsForItsCopyAndIsThenWhatItWas) {
  ASSERT_TRUE(gate_.take(vote(0, 7), 0));
  EXPECT_TRUE(gate_.take(vote(0, 7), 1)) << "the same again";
  EXPECT_TRUE(gate_.waits(0, {7, kIncarnation}));
  gate_.copied(1, {7, kIncarnation});
  gate_.copied(0, {6, kIncarnation});
  EXPECT_TRUE(gate_.ready().empty());
  gate_.copied(0, {7, kIncarnation});
  const auto passed = gate_.ready();
  ASSERT_EQ(passed.size(), 1u);
  EXPECT_EQ(passed[0].held.cut, 4u);
  EXPECT_EQ(passed[0].held.replicas, 6u);
  EXPECT_FALSE(gate_.waits(0, {7, kIncarnation}));
}

TEST_F(CopyGateTest, VotesPassInTheOrderOfTheirSteps) {
  gate_.take(vote(0, 7), 0);
  gate_.take(vote(1, 7), 0);
  ASSERT_TRUE(gate_.take(vote(0, 8, false), 1)) << "no slot was free: it may not pass the others";
  gate_.take(vote(1, 9), 2);
  gate_.copied(1, {9, kIncarnation});
  gate_.copied(1, {7, kIncarnation});
  EXPECT_TRUE(gate_.ready().empty());
  gate_.copied(0, {7, kIncarnation});
  std::vector<int64_t> steps;
  for (const CopyGate::Vote& passed : gate_.ready()) {
    steps.push_back(passed.key.step);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{7, 7, 8, 9}));
  EXPECT_FALSE(gate_.take(vote(0, 10, false), 3)) << "nothing waits";
}

TEST_F(CopyGateTest, VotesWithoutASlotOfOthersOrOfAnotherAttemptDoNotWait) {
  EXPECT_FALSE(gate_.take(vote(0, 7, false), 0));
  EXPECT_FALSE(gate_.take(vote(2, 7), 0));
  EXPECT_FALSE(gate_.take(vote(0, 7, true, kIncarnation + 1), 0));
}

TEST_F(CopyGateTest, AfterItsPatienceAllVotesPassUntilACopyArrives) {
  gate_.take(vote(0, 7), 0);
  gate_.take(vote(1, 7), 5);
  EXPECT_TRUE(gate_.tick(kPatience - 1).empty());
  EXPECT_FALSE(gate_.isBehind());
  EXPECT_EQ(gate_.tick(kPatience).size(), 2u);
  EXPECT_TRUE(gate_.isBehind());
  EXPECT_FALSE(gate_.take(vote(0, 8), 11)) << "at once";
  gate_.copied(0, {8, kIncarnation});
  EXPECT_TRUE(gate_.ready().empty());
  EXPECT_FALSE(gate_.isBehind());
  EXPECT_TRUE(gate_.take(vote(0, 9), 12));
}

TEST_F(CopyGateTest, ACopyThatMovesIsWaitedForButNotForEver) {
  gate_.take(vote(0, 7), 0);
  for (int64_t now = 0; now < kLongest; now += kPatience - 1) {
    gate_.moved(now);
    EXPECT_TRUE(gate_.tick(now).empty()) << now;
  }
  EXPECT_FALSE(gate_.isBehind());
  gate_.moved(kLongest);
  EXPECT_EQ(gate_.tick(kLongest).size(), 1u) << "a keeper that takes a byte now and then";
  EXPECT_TRUE(gate_.isBehind());
}

TEST_F(CopyGateTest, AKeeperWithoutMemoryEndsTheWait) {
  gate_.take(vote(0, 7), 0);
  EXPECT_EQ(gate_.failed().size(), 1u);
  EXPECT_TRUE(gate_.isBehind());
  EXPECT_TRUE(gate_.failed().empty());
}

TEST_F(CopyGateTest, ANewAttemptStartsWithNothingThatWaits) {
  gate_.take(vote(0, 7), 0);
  gate_.failed();
  gate_.take(vote(1, 7), 0);
  gate_.expect({0}, kIncarnation + 1);
  EXPECT_FALSE(gate_.isBehind());
  EXPECT_TRUE(gate_.tick(1000).empty());
  gate_.copied(0, {7, kIncarnation});
  EXPECT_TRUE(gate_.ready().empty()) << "of the attempt before";
  EXPECT_TRUE(gate_.take(vote(0, 8, true, kIncarnation + 1), 0));
}

TEST_F(CopyGateTest, VotesPassOnceNoCopiesAreWantedAnyMore) {
  gate_.take(vote(0, 7), 0);
  gate_.take(vote(1, 7), 0);
  gate_.expect({1}, kIncarnation);
  ASSERT_EQ(gate_.ready().size(), 1u);
  EXPECT_TRUE(gate_.waits(1, {7, kIncarnation}));
  gate_.failed();
  EXPECT_TRUE(gate_.isBehind());
  gate_.expect({}, kIncarnation);
  EXPECT_FALSE(gate_.isBehind());
}

TEST_F(CopyGateTest, NothingWaitsForAStepThatIsDecided) {
  gate_.take(vote(0, 7), 0);
  gate_.take(vote(0, 8), 0);
  gate_.decided({7, kIncarnation}, true);
  EXPECT_FALSE(gate_.waits(0, {7, kIncarnation}));
  EXPECT_TRUE(gate_.waits(0, {8, kIncarnation}));
  gate_.copied(0, {8, kIncarnation});
  EXPECT_EQ(gate_.ready().size(), 1u);
}

TEST_F(CopyGateTest, RanksWhoseVotesDidNotWaitBeforeAreNamed) {
  EXPECT_EQ(gate_.expect({0, 1}, kIncarnation), std::set<int>{});
  EXPECT_EQ(gate_.expect({1, 2}, kIncarnation), std::set<int>{2});
  EXPECT_EQ(gate_.expect({1, 2}, kIncarnation + 1), (std::set<int>{1, 2})) << "another attempt";
}

TEST_F(CopyGateTest, CopiesAreLateOnceTrainingIsAStepFurther) {
  EXPECT_EQ(gate_.state(), State::kFresh);
  gate_.take(vote(0, 7), 0);
  gate_.take(vote(1, 7), 0);
  EXPECT_EQ(gate_.state(), State::kFresh) << "of the same step";
  gate_.take(vote(0, 8, false), 1);
  EXPECT_EQ(gate_.state(), State::kLate);
  gate_.copied(0, {7, kIncarnation});
  gate_.copied(1, {7, kIncarnation});
  gate_.ready();
  EXPECT_EQ(gate_.state(), State::kLate) << "other nodes may not have theirs";
  gate_.decided({8, kIncarnation}, false);
  EXPECT_EQ(gate_.state(), State::kLate);
  gate_.decided({7, kIncarnation}, true);
  EXPECT_EQ(gate_.state(), State::kThere);
  gate_.take(vote(0, 9), 2);
  gate_.take(vote(0, 10), 3);
  EXPECT_EQ(gate_.state(), State::kThere) << "step 7 is safe, and stays so until a later one is";
}

TEST_F(CopyGateTest, ACommitOfWhatPassedWithoutACopyDoesNotCountAsOneWithACopy) {
  gate_.take(vote(0, 7), 0);
  gate_.tick(kPatience);
  EXPECT_EQ(gate_.state(), State::kMissing);
  gate_.take(vote(0, 8), 11);
  gate_.copied(1, {7, kIncarnation});
  EXPECT_FALSE(gate_.isBehind());
  gate_.decided({7, kIncarnation}, true);
  gate_.decided({8, kIncarnation}, true);
  EXPECT_EQ(gate_.state(), State::kMissing) << "both passed without a copy of rank 0's";
  gate_.take(vote(0, 9), 12);
  gate_.decided({9, kIncarnation}, true);
  EXPECT_EQ(gate_.state(), State::kThere);
}

TEST_F(CopyGateTest, AnotherAttemptOrNoCopiesAtAllBeginAfresh) {
  gate_.take(vote(0, 7), 0);
  gate_.failed();
  gate_.expect({}, kIncarnation);
  EXPECT_EQ(gate_.state(), State::kFresh);
  gate_.decided({7, kIncarnation}, true);
  EXPECT_EQ(gate_.state(), State::kFresh) << "nobody asked for copies";
  gate_.expect({0}, kIncarnation);
  gate_.take(vote(0, 8), 0);
  gate_.take(vote(0, 9), 0);
  EXPECT_EQ(gate_.state(), State::kLate);
  gate_.expect({0}, kIncarnation + 1);
  EXPECT_EQ(gate_.state(), State::kFresh);
  gate_.decided({9, kIncarnation}, true);
  EXPECT_EQ(gate_.state(), State::kFresh) << "of the attempt before";
}

}  // namespace copy_gate_test
}  // namespace reft::agent
