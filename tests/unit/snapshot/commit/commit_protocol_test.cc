#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "snapshot/commit/commit_ledger.h"
#include "snapshot/commit/slot_book.h"

namespace reft {
namespace commit_protocol_test {

constexpr uint64_t kInc = 7;
using Action = CommitLedger::Action;

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
    act(ledger_->vote(static_cast<int>(&rank - ranks_.data()), {vote.step, kInc},
                      {vote.sealed, 0}));
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

}  // namespace commit_protocol_test
}  // namespace reft
