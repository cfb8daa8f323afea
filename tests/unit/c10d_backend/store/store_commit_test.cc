#include "c10d_backend/store/store_commit.h"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "intercept/record/cut.h"

namespace reft {
namespace store_commit_test {

// The first rank of a node.
class Node {
 public:
  Node(const c10::intrusive_ptr<c10d::Store>& store, int nodes)
      : commit_(store, nodes, [this](const wire::Ballot& outcome) {
          const std::lock_guard lock(mutex_);
          outcomes_[outcome.step].push_back(outcome);
          arrived_.notify_all();
        }) {}

  void vote(int64_t step, bool sealed, uint64_t cut = 0, uint64_t replicas = 0,
            bool plan_anew = false, uint8_t proposal = 0) {
    wire::Ballot ballot{};
    ballot.step = step;
    ballot.incarnation = 7;
    ballot.yes = sealed ? 1 : 0;
    ballot.cut = cut;
    ballot.replicas = replicas;
    ballot.plan_anew = plan_anew ? 1 : 0;
    ballot.proposal = proposal;
    commit_.vote(ballot);
  }

  // The `count`th outcome of a step.
  wire::Ballot outcome(int64_t step, size_t count = 1) {
    std::unique_lock lock(mutex_);
    const bool came = arrived_.wait_for(lock, std::chrono::seconds(60),
                                        [&] { return outcomes_[step].size() >= count; });
    EXPECT_TRUE(came) << "step " << step;
    return came ? outcomes_[step][count - 1] : wire::Ballot{};
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<int64_t, std::vector<wire::Ballot>> outcomes_;
  StoreCommit commit_;  // last: its thread uses the others
};

class StoreCommitTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  Node a_{store_, 2}, b_{store_, 2};
};

TEST_F(StoreCommitTest, CommitsWhatBothNodesSealed) {
  a_.vote(1, true, 5, 6, false, 3);
  b_.vote(1, true, 0 - uint64_t{5}, 0 - uint64_t{6});
  for (Node* node : {&a_, &b_}) {
    const wire::Ballot outcome = node->outcome(1);
    EXPECT_EQ(outcome.yes, 1);
    EXPECT_EQ(outcome.proposal, 3);
    EXPECT_EQ(outcome.plan_anew, 0);
  }
}

TEST_F(StoreCommitTest, AbortsIfReplicasDoNotAgreeAndAsksForAPlan) {
  a_.vote(1, true, 0, 6);
  b_.vote(1, true, 0, 7);
  for (Node* node : {&a_, &b_}) {
    const wire::Ballot outcome = node->outcome(1);
    EXPECT_EQ(outcome.yes, 0);
    EXPECT_NE(outcome.replicas, 0u);
    EXPECT_EQ(outcome.cut, 0u);
    EXPECT_EQ(outcome.plan_anew, 1);
  }
}

TEST_F(StoreCommitTest, AnInconsistentCutIsTheReasonBeforeReplicas) {
  a_.vote(1, true, 1, 6);
  b_.vote(1, true, 1, 7);
  EXPECT_NE(a_.outcome(1).cut, 0u);
  EXPECT_EQ(a_.outcome(1).replicas, 0u);
  EXPECT_EQ(a_.outcome(1).plan_anew, 0);
}

TEST_F(StoreCommitTest, PassesOnThatAVoteAskedForAPlan) {
  a_.vote(1, true, kUnknownCut);
  b_.vote(1, true, 3, 0, true, 2);
  EXPECT_EQ(a_.outcome(1).yes, 1);
  EXPECT_EQ(a_.outcome(1).plan_anew, 1);
  EXPECT_EQ(a_.outcome(1).proposal, 2);
  a_.vote(2, true);
  b_.vote(2, false, 0, 0, true);
  EXPECT_EQ(a_.outcome(2).yes, 0);
  EXPECT_EQ(a_.outcome(2).plan_anew, 1);
}

TEST_F(StoreCommitTest, ANodeThatIsFarBehindGetsItsOutcome) {
  // Another node gives up step after step and has gone on long before this one asks.
  for (int64_t step = 1; step <= 40; ++step) {
    b_.vote(step, false);
    EXPECT_EQ(b_.outcome(step).yes, 0);
  }
  for (int64_t step = 1; step <= 40; ++step) {
    a_.vote(step, true);
    EXPECT_EQ(a_.outcome(step).yes, 0);
  }
}

TEST_F(StoreCommitTest, AVoteThatComesAgainCountsOnce) {
  a_.vote(1, true);
  a_.vote(1, true);
  b_.vote(1, false);
  EXPECT_EQ(a_.outcome(1, 2).yes, 0);
  a_.vote(2, true);
  b_.vote(2, true);
  EXPECT_EQ(a_.outcome(2).yes, 1);
  a_.vote(2, true);
  EXPECT_EQ(a_.outcome(2, 2).yes, 1) << "from memory: the store has forgotten it";
}

TEST_F(StoreCommitTest, TheStoreDoesNotGrow) {
  for (int64_t step = 1; step <= 50; ++step) {
    a_.vote(step, true, 1, 1);
    b_.vote(step, step % 3 != 0, 0 - uint64_t{1}, 0 - uint64_t{1});
    a_.outcome(step);
    b_.outcome(step);
  }
  a_.vote(51, false);
  b_.vote(51, false);
  a_.outcome(51);
  b_.outcome(51);
  // The last step's keys go after its outcome was passed on.
  EXPECT_LE(store_->getNumKeys(), 6);
}

}  // namespace store_commit_test
}  // namespace reft
