#include "c10d_backend/store/store_commit.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "intercept/record/cut.h"

namespace reft {
namespace store_commit_test {

std::shared_ptr<const ValueSeal> sealOf(const char* attempt) {
  return std::make_shared<ValueSeal>(std::string(ValueSeal::kSecretBytes, 's'), attempt, 4);
}

// The first rank of a node.
class Node {
 public:
  Node(const c10::intrusive_ptr<c10d::Store>& store, int node, int nodes)
      : commit_(store, sealOf("attempt"), {node, nodes}, [this](const wire::Ballot& outcome) {
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
  Node a_{store_, 0, 2}, b_{store_, 1, 2};
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

// What one node asks of the store of all; polls (`check`) are not counted.
class CountedStore : public c10d::Store {
 public:
  explicit CountedStore(c10::intrusive_ptr<c10d::Store> all) : all_(std::move(all)) {}
  size_t operations() const { return operations_; }

  c10::intrusive_ptr<Store> clone() override {
    return c10::intrusive_ptr<Store>::unsafe_reclaim_from_nonowning(this);
  }
  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++operations_;
    all_->set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& before,
                                  const std::vector<uint8_t>& after) override {
    ++operations_;
    return all_->compareSet(key, before, after);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++operations_;
    return all_->get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    operations_ += keys.size();
    return all_->multiGet(keys);
  }
  bool hasExtendedApi() const override { return true; }
  int64_t add(const std::string& key, int64_t value) override {
    ++operations_;
    return all_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    ++operations_;
    return all_->deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override { return all_->check(keys); }
  int64_t getNumKeys() override { return all_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { all_->wait(keys); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    all_->wait(keys, timeout);
  }

 private:
  c10::intrusive_ptr<c10d::Store> all_;
  std::atomic<size_t> operations_ = 0;
};

class ManyNodes : public ::testing::TestWithParam<int> {
 protected:
  ManyNodes() {
    for (int node = 0; node < GetParam(); ++node) {
      stores_.push_back(c10::make_intrusive<CountedStore>(all_));
      nodes_.push_back(std::make_unique<Node>(stores_.back(), node, GetParam()));
    }
  }
  // Nodes from the last to the first; `dropped`: has not sealed.
  void vote(int64_t step, int dropped = -1, bool anew = false) {
    const int count = GetParam();
    for (int node = count - 1; node >= 0; --node) {
      const bool first = node == 0;
      nodes_[static_cast<size_t>(node)]->vote(step, node != dropped,
                                              first ? 0 - static_cast<uint64_t>(count - 1) : 1, 0,
                                              anew && node == count - 1, node == count - 1 ? 3 : 0);
    }
  }
  c10::intrusive_ptr<c10d::HashStore> all_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<CountedStore>> stores_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

INSTANTIATE_TEST_SUITE_P(Nodes, ManyNodes, ::testing::Values(16, 33, 34, 128, 1024));

TEST_P(ManyNodes, EachMakesAFewOperationsForACommit) {
  constexpr int64_t kSteps = 4;
  for (int64_t step = 1; step <= kSteps; ++step) {
    vote(step, -1, step == 2);
    for (const auto& node : nodes_) {
      const wire::Ballot outcome = node->outcome(step);
      ASSERT_EQ(outcome.yes, 1) << step;
      EXPECT_EQ(outcome.proposal, 3);
      EXPECT_EQ(outcome.plan_anew, step == 2 ? 1 : 0);
    }
  }
  nodes_.clear();  // their threads have ended
  size_t most = 0, least = SIZE_MAX;
  for (const auto& store : stores_) {
    most = std::max(most, store->operations());
    least = std::min(least, store->operations());
  }
  RecordProperty("most_operations_a_step", static_cast<int>(most / kSteps));
  EXPECT_EQ(least,
            3 * kSteps);  // of a node with none below: its vote, the outcome, that it read it
  EXPECT_LE(most, (2 * 32 + 5) * kSteps);
  EXPECT_LE(all_->getNumKeys(), 0);
}

TEST_P(ManyNodes, ADroppedSnapshotOfAnyNodeAbortsAndLeavesNothing) {
  int64_t step = 0;
  for (const int dropped : {0, 1, GetParam() / 2, GetParam() - 1}) {
    vote(++step, dropped);
    for (const auto& node : nodes_) {
      EXPECT_EQ(node->outcome(step).yes, 0) << dropped;
    }
  }
  nodes_.clear();
  EXPECT_EQ(all_->getNumKeys(), 0);
  size_t most = 0;
  for (const auto& store : stores_) {
    most = std::max(most, store->operations());
  }
  EXPECT_LE(most, static_cast<size_t>(step) * 4 * 32);
}

TEST_P(ManyNodes, APointThatOneNodeHasNotReachedIsFound) {
  vote(1);
  EXPECT_EQ(nodes_.front()->outcome(1).yes, 1);
  for (auto& node : nodes_) {
    node->vote(2, true, 1);
  }
  EXPECT_EQ(nodes_.back()->outcome(2).yes, 0);
  EXPECT_EQ(nodes_.front()->outcome(2).cut, 1u);
}

std::vector<uint8_t> bytesOf(const std::string& text) {
  return {text.begin(), text.end()};
}

TEST_F(StoreCommitTest, AVoteOfAnOutsiderCommitsNothing) {
  // Node b has not sealed yet. Before the seals, one `add` to a counter committed for it.
  const wire::Ballot ballot{.step = 1,
                            .incarnation = 7,
                            .cut = 0,
                            .replicas = 0,
                            .yes = 1,
                            .proposal = 0,
                            .plan_anew = 0,
                            .reserved = {}};
  const std::string raw(reinterpret_cast<const char*>(&ballot), sizeof(ballot));
  store_->set("commit/vote/1/1", bytesOf(raw));
  store_->add("commit/sealed/1", 1);
  a_.vote(1, true);
  EXPECT_EQ(a_.outcome(1).yes, 0);
  // Replayed: of another step, of another node, of an earlier attempt.
  const auto seal = sealOf("attempt");
  const std::string forged[] = {
      seal->seal(ValueKind::kVote, "commit/vote/1/1", 1, raw),
      seal->seal(ValueKind::kVote, "commit/vote/3/1", 0, raw),
      sealOf("attempt before")->seal(ValueKind::kVote, "commit/vote/4/1", 1, raw)};
  int64_t step = 2;
  for (const std::string& value : forged) {
    store_->set("commit/vote/" + std::to_string(step) + "/1", bytesOf(value));
    a_.vote(step, true);
    EXPECT_EQ(a_.outcome(step).yes, 0) << "step " << step;
    ++step;
  }
}

TEST_F(StoreCommitTest, AnOutcomeOfAnOutsiderIsIgnored) {
  const uint64_t before = ValueSeal::refused();
  for (const std::string& forged :
       {std::string("1"), std::string({'1', 0, 1}), std::string(), std::string(1 << 20, '1')}) {
    store_->set("commit/outcome/1", bytesOf(forged));
    b_.vote(1, true);
  }
  a_.vote(1, false);
  EXPECT_EQ(a_.outcome(1).yes, 0);
  EXPECT_EQ(b_.outcome(1).yes, 0);
  EXPECT_GT(ValueSeal::refused(), before);
  a_.vote(2, true);
  b_.vote(2, true);
  EXPECT_EQ(b_.outcome(2).yes, 1) << "the next step is not affected";
}

TEST_F(StoreCommitTest, AForkedChildEndsWithoutTheThreadsOfItsParent) {
  auto commit = std::make_unique<StoreCommit>(store_, sealOf("attempt"), StoreCommit::Place{0, 2},
                                              [](const wire::Ballot&) {});
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    commit.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "a signal of 14: it hung";
}

// A store whose process is stopped: its client does not return until `answers` is set.
class SilentStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    asked.set_value();
    answers.get_future().wait();
    HashStore::set(key, value);
  }
  std::promise<void> asked, answers;
};

TEST(SilentStoreCommit, TheEndDoesNotWaitForAStoreThatNeverAnswers) {
  const auto store = c10::make_intrusive<SilentStore>();
  const auto own = std::make_shared<int>(0);
  auto commit = std::make_unique<StoreCommit>(store, sealOf("attempt"), StoreCommit::Place{1, 2},
                                              [own](const wire::Ballot&) {});
  wire::Ballot ballot{};
  ballot.step = 1;
  ballot.yes = 1;
  commit->vote(ballot);
  store->asked.get_future().wait();
  commit.reset();
  EXPECT_EQ(own.use_count(), 2) << "the abandoned thread owns what it uses";
  store->answers.set_value();
  while (own.use_count() > 1 || store.use_count() > 1) {  // until the thread has let go of both
    std::this_thread::yield();
  }
}

}  // namespace store_commit_test
}  // namespace reft
