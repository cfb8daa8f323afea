#include "snapshot/commit/commit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/cut.h"

namespace reft {
namespace {

constexpr uint64_t kInc = 7;
using Action = CommitLedger::Action;

int write(SlotBook& book, int64_t step) {
  const auto slot = book.acquire(step, kInc);
  EXPECT_TRUE(slot.has_value()) << step;
  book.sealed(*slot);
  return *slot;
}

TEST(SlotBook, WaitsWhileTheNewestSnapshotIsUndecided) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  write(book, 2);
  EXPECT_FALSE(book.canAcquire());
  EXPECT_FALSE(book.acquire(3, kInc).has_value());
  book.outcome(2, kInc, true);
  EXPECT_EQ(book.acquire(3, kInc), 0);
  EXPECT_EQ(book.newestCommitted(), 2);
  EXPECT_TRUE(book.find(2, kInc).has_value());
}

TEST(SlotBook, FillsBothEmptySlotsBeforeTheFirstOutcome) {
  SlotBook book(2);
  EXPECT_EQ(write(book, 1), 0);
  EXPECT_EQ(write(book, 2), 1);
  EXPECT_EQ(book.undecided(), 2u);
  EXPECT_FALSE(book.canAcquire());
}

TEST(SlotBook, ReusesAbortedSlotAndKeepsCommittedOne) {
  SlotBook book(2);
  const int kept = write(book, 1);
  book.outcome(1, kInc, true);
  const int second = write(book, 2);
  book.outcome(2, kInc, false);
  EXPECT_EQ(book.acquire(3, kInc), second);
  EXPECT_EQ(book.find(1, kInc), kept);
}

TEST(SlotBook, KeepsCommittedSlotWhenALateAbortNamesIt) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  book.outcome(1, kInc, false);
  EXPECT_TRUE(book.find(1, kInc).has_value());
  write(book, 2);
  EXPECT_FALSE(book.canAcquire());
}

TEST(SlotBook, FreesSlotWhoseAbortCameWhileItWasWritten) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  const auto slot = book.acquire(2, kInc);
  book.outcome(2, kInc, false);
  book.sealed(*slot);
  EXPECT_FALSE(book.find(2, kInc).has_value());
  EXPECT_EQ(book.acquire(3, kInc), slot);
}

TEST(SlotBook, DroppedSlotIsFreeAtOnce) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  const auto slot = book.acquire(2, kInc);
  book.dropped(*slot);
  EXPECT_EQ(book.acquire(3, kInc), slot);
}

TEST(SlotBook, IgnoresCommitOfStepThatNoSlotHolds) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  write(book, 2);
  book.outcome(9, kInc, true);
  EXPECT_EQ(book.newestCommitted(), 1);
  EXPECT_FALSE(book.canAcquire());
}

TEST(SlotBook, IgnoresOutcomesOfAnotherIncarnation) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc + 1, true);
  EXPECT_EQ(book.newestCommitted(), SlotBook::kNone);
  EXPECT_EQ(book.undecided(), 1u);
}

TEST(SlotBook, ProtectsRestoredSlotUntilSomethingNewerIsCommitted) {
  SlotBook book(2);
  book.adopt(1, 100, 3);
  EXPECT_EQ(book.newestCommitted(), 100);
  EXPECT_EQ(book.acquire(101, kInc), 0);
  book.sealed(0);
  EXPECT_FALSE(book.canAcquire());
  book.outcome(101, kInc, false);
  EXPECT_EQ(book.acquire(102, kInc), 0);
  book.sealed(0);
  book.outcome(102, kInc, true);
  EXPECT_EQ(book.acquire(103, kInc), 1);
}

TEST(SlotBook, AdoptedSlotIsOlderThanALowerStepOfThisIncarnation) {
  SlotBook book(2);
  book.adopt(0, 100, 3);
  EXPECT_EQ(book.acquire(0, kInc), 1);
  book.sealed(1);
  book.outcome(0, kInc, true);
  EXPECT_EQ(book.newestCommitted(), 0);
  EXPECT_EQ(book.acquire(1, kInc), 0);
}

TEST(SlotBook, ThreeSlotsReuseTheOldestFirst) {
  SlotBook book(3);
  for (int64_t step = 1; step <= 3; ++step) {
    write(book, step);
    book.outcome(step, kInc, true);
  }
  EXPECT_EQ(book.acquire(4, kInc), 0);
}

TEST(SlotBook, RejectsMisuse) {
  EXPECT_THROW(SlotBook(0), InvalidArgument);
  SlotBook book(2);
  EXPECT_THROW(book.sealed(0), InvalidArgument);
  EXPECT_THROW(book.dropped(5), InvalidArgument);
  EXPECT_THROW(book.adopt(2, 1, 1), InvalidArgument);
  book.adopt(0, 1, 1);
  EXPECT_THROW(book.adopt(1, 2, 1), InvalidArgument);
  book.acquire(5, kInc);
  EXPECT_THROW(book.acquire(6, kInc), InvalidArgument);
  book.sealed(1);
  EXPECT_THROW(book.acquire(5, kInc), InvalidArgument);
  EXPECT_THROW(book.acquire(6, kInc + 1), InvalidArgument);
  EXPECT_THROW(book.adopt(0, 1, 1), InvalidArgument);
}

TEST(CommitLedger, CommitsWhenEveryRankSealed) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  EXPECT_TRUE(ledger.vote(0, {5, kInc}, true, 7).empty());
  EXPECT_EQ(ledger.open().size(), 1u);
  const auto actions = ledger.vote(1, {5, kInc}, true, 0 - uint64_t{7});
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_EQ(ledger.newestCommitted(), (CommitKey{5, kInc}));
  EXPECT_TRUE(ledger.open().empty());
}

TEST(CommitLedger, AbortsWhenProgramPointsDoNotBelongTogether) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, true, 7);
  const auto actions = ledger.vote(1, {5, kInc}, true, 0 - uint64_t{9});
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
  ledger.vote(0, {5, kInc}, true, kUnknownCut);
  const auto actions = ledger.vote(1, {5, kInc}, true, 8);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
}

TEST(CommitLedger, AbortsAtTheFirstDroppedVote) {
  CommitLedger ledger;
  ledger.expect(kInc, 3, false);
  const auto actions = ledger.vote(2, {5, kInc}, false, 0);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_FALSE(actions[0].yes);
  const auto late = ledger.vote(0, {5, kInc}, true, 0);
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].kind, Action::kAnswer);
  EXPECT_EQ(late[0].rank, 0);
  EXPECT_FALSE(late[0].yes);
}

TEST(CommitLedger, AnswersRepeatedVoteWithTheSameOutcome) {
  CommitLedger ledger;
  ledger.expect(kInc, 1, false);
  ledger.vote(0, {5, kInc}, true, 0);
  const auto again = ledger.vote(0, {5, kInc}, false, 0);  // even if it says something else now
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].kind, Action::kAnswer);
  EXPECT_TRUE(again[0].yes);
  EXPECT_EQ(ledger.counters().repeated, 1u);
}

TEST(CommitLedger, CountsOneRankOnce) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {5, kInc}, true, 0);
  EXPECT_TRUE(ledger.vote(0, {5, kInc}, true, 0).empty());
}

TEST(CommitLedger, KeepsIncarnationsApart) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.expect(kInc + 1, 2, false);
  ledger.vote(0, {5, kInc}, true, 0);
  EXPECT_TRUE(ledger.vote(1, {5, kInc + 1}, true, 0).empty());
}

TEST(CommitLedger, CountsVotesThatCameBeforeTheWorldWasKnown) {
  CommitLedger ledger;
  EXPECT_TRUE(ledger.vote(0, {5, kInc}, true, 0).empty());
  const auto actions = ledger.expect(kInc, 1, false);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_THROW(ledger.expect(kInc, 0, false), InvalidArgument);
}

TEST(CommitLedger, SeveralNodesWaitForTheOutcomeOfTheJob) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, true);
  ledger.vote(4, {5, kInc}, true, 9);
  auto actions = ledger.vote(5, {5, kInc}, true, 8);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kNodeVote);
  EXPECT_TRUE(actions[0].yes);
  EXPECT_EQ(actions[0].cut, 17u);
  actions =
      ledger.vote(4, {5, kInc}, true, 9);  // after a reconnect: the node's vote may have been lost
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kNodeVote);
  actions = ledger.jobOutcome({5, kInc}, false);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].kind, Action::kBroadcast);
  EXPECT_FALSE(actions[0].yes);
  actions = ledger.jobOutcome({5, kInc}, true);  // a second, contradicting one does not change it
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_FALSE(actions[0].yes);
}

TEST(CommitLedger, VaultOfAnsweredRankCompletesAVoteAfterAnAgentRestart) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  ledger.vaultHolds(0, {{{4, kInc}, {true}},
                        {{5, kInc}, {true}},
                        {{3, kInc - 1}, {true}}});  // told the outcome by the earlier agent
  const auto actions = ledger.vote(1, {5, kInc}, true, 0);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].yes);
}

TEST(CommitLedger, LaterVoteOfARankThatLacksTheStepAbortsIt) {
  CommitLedger ledger([](int, const CommitKey& key) { return CommitLedger::Held{key.step == 4}; });
  ledger.expect(kInc, 2, false);
  ledger.vote(0, {4, kInc}, true, 0);
  ledger.vote(0, {5, kInc}, true, 0);
  const auto actions = ledger.vote(1, {6, kInc}, true, 0);
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
  ledger.vote(0, {5, kInc}, true, 0);
  EXPECT_TRUE(ledger.vote(1, {6, kInc}, true, 0).empty());
}

TEST(CommitLedger, ForgetsTheOldestInsteadOfGrowing) {
  CommitLedger ledger;
  ledger.expect(kInc, 2, false);
  for (int64_t step = 0; step < 10000; ++step) {
    ledger.vote(0, {step, kInc}, true, 0);
  }
  EXPECT_LE(ledger.open().size(), CommitLedger::kRemembered);
  for (uint64_t inc = 100; inc < 200; ++inc) {
    ledger.vote(0, {1, inc}, true, 0);
  }
  EXPECT_LE(ledger.open().size(), CommitLedger::kRemembered * CommitLedger::kIncarnations);
}

// The two machines together, with votes and outcomes delayed at will and agents that die: at every
// instant (a crash of the whole job could come there) the newest committed step, or a newer one, is
// sealed in every vault.
class Cluster {
 public:
  Cluster(size_t ranks, int slots, uint32_t seed) : random_(seed) {
    for (size_t i = 0; i < ranks; ++i) {
      ranks_.emplace_back(slots);
    }
    startAgent();
  }

  void turn() {
    const auto pick = random_() % 100;
    auto& rank = ranks_[random_() % ranks_.size()];
    if (pick < 40) {
      work(rank);
    } else if (pick < 70) {
      deliverVote(rank);
    } else if (pick < 98) {
      deliverOutcome(rank);
    } else {
      startAgent();
    }
  }

  // Lets everything that is under way arrive.
  void settle() {
    for (int i = 0; i < 200; ++i) {
      for (auto& rank : ranks_) {
        deliverVote(rank);
        deliverOutcome(rank);
      }
    }
  }

  int64_t newestCommon() const {
    int64_t best = SlotBook::kNone;
    for (const auto step : ranks_[0].vault) {
      if (std::all_of(ranks_.begin(), ranks_.end(),
                      [&](const Rank& rank) { return holds(rank, step); })) {
        best = std::max(best, step);
      }
    }
    return best;
  }

  int64_t newestCommitted() const {
    int64_t newest = SlotBook::kNone;
    for (const auto& rank : ranks_) {
      newest = std::max(newest, rank.book.newestCommitted());
    }
    return newest;
  }

 private:
  struct Vote {
    int64_t step;
    bool sealed;
  };
  struct Rank {
    explicit Rank(int slots) : book(slots), vault(static_cast<size_t>(slots), SlotBook::kNone) {}
    SlotBook book;
    std::vector<int64_t> vault;  // step that each slot holds sealed
    std::deque<Vote> to_agent, unanswered;
    std::deque<std::pair<int64_t, bool>> from_agent;
    int64_t step = 0;
    std::optional<int> writing;
  };

  static bool holds(const Rank& rank, int64_t step) {
    return step != SlotBook::kNone &&
           std::find(rank.vault.begin(), rank.vault.end(), step) != rank.vault.end();
  }

  void work(Rank& rank) {
    if (rank.writing) {
      const bool good = random_() % 10 != 0;
      const auto slot = static_cast<size_t>(*rank.writing);
      if (good) {
        rank.vault[slot] = rank.step;
        rank.book.sealed(*rank.writing);
      } else {
        rank.book.dropped(*rank.writing);
      }
      rank.writing.reset();
      vote(rank, good);
      return;
    }
    // A step ends on all ranks together: nobody is two steps ahead.
    if (std::any_of(ranks_.begin(), ranks_.end(),
                    [&](const Rank& other) { return other.step < rank.step; })) {
      return;
    }
    if (!rank.book.canAcquire() && random_() % 50 != 0) {
      return;  // waits a while before it skips
    }
    ++rank.step;
    rank.writing = rank.book.acquire(rank.step, kInc);
    if (rank.writing) {
      rank.vault[static_cast<size_t>(*rank.writing)] = SlotBook::kNone;
    } else {
      vote(rank, false);  // skipped
    }
  }

  void vote(Rank& rank, bool sealed) {
    rank.to_agent.push_back({rank.step, sealed});
    rank.unanswered.push_back({rank.step, sealed});
  }

  void deliverVote(Rank& rank) {
    if (rank.to_agent.empty()) {
      return;
    }
    const auto vote = rank.to_agent.front();
    rank.to_agent.pop_front();
    act(ledger_->vote(static_cast<int>(&rank - ranks_.data()), {vote.step, kInc}, vote.sealed, 0));
  }

  void deliverOutcome(Rank& rank) {
    if (rank.from_agent.empty()) {
      return;
    }
    const auto [step, committed] = rank.from_agent.front();
    rank.from_agent.pop_front();
    rank.book.outcome(step, kInc, committed);
    std::erase_if(rank.unanswered, [step = step](const Vote& vote) { return vote.step == step; });
  }

  void act(const std::vector<Action>& actions) {
    for (const auto& action : actions) {
      const auto [known, first] = decided_.emplace(action.key.step, action.yes);
      if (!first && known->second && !action.yes) {
        // An agent that knows less may call a committed step aborted, but only if it is not needed
        // any more.
        EXPECT_GT(newestCommon(), action.key.step);
      }
      EXPECT_FALSE(!first && !known->second && action.yes) << "aborted first, committed later";
      for (size_t i = 0; i < ranks_.size(); ++i) {
        if (action.kind == Action::kBroadcast || action.rank == static_cast<int>(i)) {
          ranks_[i].from_agent.emplace_back(action.key.step, action.yes);
        }
      }
    }
  }

  // The old agent is gone with everything under way; the ranks connect to a new one.
  void startAgent() {
    ledger_.emplace([this](int rank, const CommitKey& key) {
      return CommitLedger::Held{holds(ranks_[static_cast<size_t>(rank)], key.step)};
    });
    ledger_->expect(kInc, static_cast<int>(ranks_.size()), false);
    for (auto& rank : ranks_) {
      rank.to_agent.clear();
      rank.from_agent.clear();
    }
    for (size_t i = 0; i < ranks_.size(); ++i) {
      std::vector<std::pair<CommitKey, CommitLedger::Held>> keys;
      for (const auto step : ranks_[i].vault) {
        if (step != SlotBook::kNone) {
          keys.push_back({{step, kInc}, {true}});
        }
      }
      act(ledger_->vaultHolds(static_cast<int>(i), keys));
      ranks_[i].to_agent = ranks_[i].unanswered;
    }
  }

  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::optional<CommitLedger> ledger_;
  std::map<int64_t, bool> decided_;
};

class CommitProtocol : public ::testing::TestWithParam<int> {};

TEST_P(CommitProtocol, KeepsTheNewestCommittedStepInEveryVault) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Cluster cluster(2 + seed % 3, GetParam(), seed);
    for (int turn = 0; turn < 400; ++turn) {
      cluster.turn();
      ASSERT_GE(cluster.newestCommon(), cluster.newestCommitted())
          << "seed " << seed << " turn " << turn;
    }
  }
}

TEST_P(CommitProtocol, GoesOnAfterAgentsDied) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Cluster cluster(2 + seed % 3, GetParam(), seed);
    for (int turn = 0; turn < 400; ++turn) {
      cluster.turn();
    }
    cluster.settle();
    // A rank that waits for a vote that the dead agent had answered is released by the next vote of
    // the others, if only for a skipped step.
    const auto before = cluster.newestCommitted();
    for (int turn = 0; turn < 2000; ++turn) {
      cluster.turn();
    }
    ASSERT_GT(cluster.newestCommitted(), before) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Slots, CommitProtocol, ::testing::Values(2, 3));

}  // namespace
}  // namespace reft
