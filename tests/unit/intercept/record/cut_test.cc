#include "intercept/record/cut.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace reft {
namespace cut_test {

class Ranks {
 public:
  explicit Ranks(int size) : size_(size), counters_(static_cast<size_t>(size)) {}

  void collective(int rank) { at(rank).add(CutCounter::collectiveTerm(group_, rank, size_)); }
  void send(int from, int to) { at(from).add(CutCounter::messageTerm(group_, from, to)); }
  void receive(int to, int from) { at(to).add(0 - CutCounter::messageTerm(group_, from, to)); }
  uint64_t sum() const {
    uint64_t sum = 0;
    for (const CutCounter& counter : counters_) {
      sum = CutCounter::combine(sum, counter.value());
    }
    return sum;
  }
  CutCounter& at(int rank) { return counters_[static_cast<size_t>(rank)]; }

 private:
  uint64_t group_ = CutCounter::groupKey("0");
  int size_;
  std::vector<CutCounter> counters_;
};

TEST(Cut, AddsUpToNothingOnceAllMembersHaveBegun) {
  for (const int size : {1, 2, 3, 8}) {
    Ranks ranks(size);
    for (int round = 0; round < 5; ++round) {
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_TRUE(rank == 0 || !CutCounter::consistent(ranks.sum())) << size;
        ranks.collective(rank);
      }
      EXPECT_EQ(ranks.sum(), 0u) << size;
    }
  }
}

TEST(Cut, AMessageUnderWayIsSeen) {
  Ranks ranks(4);
  ranks.send(1, 2);
  EXPECT_FALSE(CutCounter::consistent(ranks.sum()));
  ranks.receive(2, 1);
  EXPECT_TRUE(CutCounter::consistent(ranks.sum()));
  ranks.send(2, 1);
  ranks.receive(2, 1);  // the other direction is another message
  EXPECT_FALSE(CutCounter::consistent(ranks.sum()));
  ranks.at(3).addUnknown();
  EXPECT_TRUE(CutCounter::consistent(ranks.sum())) << "not known is not checked";
}

TEST(Cut, OneRankAheadByAnyNumberOfOpsIsSeen) {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 2000; ++trial) {
    Ranks ranks(4);
    for (int op = 0; op < 20; ++op) {
      for (int rank = 0; rank < 4; ++rank) {
        ranks.collective(rank);
      }
      const int from = static_cast<int>(random() % 4), to = static_cast<int>(random() % 4);
      ranks.send(from, to);
      ranks.receive(to, from);
    }
    ASSERT_EQ(ranks.sum(), 0u);
    const int ahead = static_cast<int>(random() % 4);
    for (uint64_t op = 0; op <= random() % 3; ++op) {
      ranks.collective(ahead);
      ranks.send(ahead, (ahead + 1) % 4);
    }
    EXPECT_FALSE(CutCounter::consistent(ranks.sum()));
  }
}

TEST(Cut, StartsAgainWithANewSetOfRanks) {
  CutCounter counter;
  counter.add(5);
  counter.addUnknown();
  counter.restart();
  EXPECT_EQ(counter.value(), 0u);
}

}  // namespace cut_test
}  // namespace reft
