#include "snapshot/commit/plan_rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace reft {
namespace plan_rounds_test {

constexpr int64_t kNone = PlanRounds::kNone;

int64_t at(PlanRounds& rounds, int64_t step) {
  rounds.point(step);
  rounds.settle();
  rounds.voted(step);
  return rounds.due();
}

TEST(PlanRounds, AllPlanAtTheSecondPointBehindTheVoteThatAsked) {
  PlanRounds rounds;
  EXPECT_EQ(at(rounds, 1), kNone);
  rounds.outcome(1, true, false);
  EXPECT_EQ(at(rounds, 2), kNone);
  EXPECT_EQ(at(rounds, 3), 1);
  EXPECT_FALSE(rounds.parted());
  EXPECT_EQ(at(rounds, 4), kNone) << "once";
}

TEST(PlanRounds, VotesThatDoNotFitTogetherAskToo) {
  PlanRounds rounds;
  at(rounds, 10);
  at(rounds, 20);  // not every step has a vote
  rounds.outcome(10, false, true);
  EXPECT_EQ(at(rounds, 30), 10);
  EXPECT_TRUE(rounds.parted());
}

TEST(PlanRounds, WaitsForTheOutcomeThatDecidesAboutThisPoint) {
  PlanRounds rounds;
  at(rounds, 1);
  at(rounds, 2);
  rounds.point(3);
  EXPECT_FALSE(rounds.known());
  rounds.outcome(2, false, false);
  EXPECT_FALSE(rounds.known());
  rounds.outcome(1, false, false);
  EXPECT_TRUE(rounds.known());
}

TEST(PlanRounds, DoesNotWaitWhereNoVoteWasCast) {
  PlanRounds rounds;
  for (int64_t step = 1; step < 9; ++step) {
    rounds.point(step);
    EXPECT_TRUE(rounds.known());
  }
}

TEST(PlanRounds, VotesOfThePlanBeforeAreForgotten) {
  PlanRounds rounds;
  for (int64_t step = 1; step <= 2; ++step) {
    at(rounds, step);
    rounds.outcome(step, false, true);
  }
  EXPECT_EQ(at(rounds, 3), 1);
  EXPECT_EQ(at(rounds, 4), kNone);
  rounds.outcome(3, false, false);
  EXPECT_EQ(at(rounds, 5), kNone) << "step 2 voted with the plan before";
  rounds.outcome(5, false, true);
  at(rounds, 6);
  EXPECT_EQ(at(rounds, 7), 5);
}

TEST(PlanRounds, RanksMeetAtOnePointWheneverTheyLearnOfIt) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    struct Rank {
      PlanRounds rounds;
      std::vector<int64_t> learnt, plans;
    };
    std::vector<Rank> ranks(3);
    std::vector<int64_t> asking;
    for (int64_t step = 1; step <= 30; ++step) {
      if (random() % 5 == 0) {
        asking.push_back(step);
      }
    }
    const auto learn = [&](Rank& rank, int64_t step) {
      if (std::find(rank.learnt.begin(), rank.learnt.end(), step) == rank.learnt.end()) {
        rank.learnt.push_back(step);
        rank.rounds.outcome(step, std::find(asking.begin(), asking.end(), step) != asking.end(),
                            false);
      }
    };
    for (int64_t step = 1; step <= 30; ++step) {
      for (Rank& rank : ranks) {
        // Outcomes come in any order, the one that is waited for at last.
        for (int64_t earlier = std::max<int64_t>(1, step - 2); earlier < step; ++earlier) {
          if (random() % 2 == 0) {
            learn(rank, earlier);
          }
        }
        rank.rounds.point(step);
        if (!rank.rounds.known()) {
          learn(rank, step - 2);
        }
        rank.rounds.settle();
        rank.rounds.voted(step);
        if (rank.rounds.due() != kNone) {
          rank.plans.push_back(step);
          rank.plans.push_back(rank.rounds.due());
        }
      }
    }
    EXPECT_EQ(ranks[0].plans, ranks[1].plans);
    EXPECT_EQ(ranks[0].plans, ranks[2].plans);
  }
}

}  // namespace plan_rounds_test
}  // namespace reft
