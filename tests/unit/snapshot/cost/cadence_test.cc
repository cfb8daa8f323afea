#include "snapshot/cost/cadence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "snapshot/commit/commit_ledger.h"
#include "snapshot/commit/slot_book.h"

namespace reft {
namespace cadence_test {

constexpr int64_t kLimit = 10'000;  // one percent

CadenceOptions limited(bool decides = true) {
  return {.base = 1, .limit_ppm = kLimit, .decides = decides};
}

Overhead costs(int64_t ppm, int64_t noise_ppm = 0) {
  return {.known = true, .ppm = ppm, .noise_ppm = noise_ppm, .step_ns = 1'000'000};
}

// Asks for `steps` steps that are all committed; returns those with a snapshot.
std::vector<int64_t> take(Cadence& cadence, int64_t first, int64_t steps) {
  std::vector<int64_t> taken;
  for (int64_t step = first; step < first + steps; ++step) {
    if (cadence.ask(step, true) == Cadence::Answer::kTake) {
      taken.push_back(step);
      cadence.committed(step, cadence.proposal());
    }
  }
  return taken;
}

TEST(Cadence, WithoutALimitNoStepIsLeftOut) {
  Cadence cadence({.base = 1, .limit_ppm = 0, .decides = true});
  cadence.learn(costs(900'000));
  EXPECT_EQ(cadence.proposal(), 0);
  cadence.committed(1, 5);
  for (int64_t step = 2; step < 100; ++step) {
    EXPECT_FALSE(cadence.decidesAt(step));
    EXPECT_EQ(cadence.ask(step, false), Cadence::Answer::kTake);
  }
}

TEST(Cadence, KeepsToTheSettingOfTheUserWithoutALimit) {
  Cadence cadence({.base = 3});
  for (int64_t step = 1; step < 30; ++step) {
    EXPECT_EQ(cadence.ask(step, true) == Cadence::Answer::kTake, step % 3 == 0);
  }
}

TEST(Cadence, BecomesAsRareAsTheLimitAsksForAndFrequentAgain) {
  Cadence cadence(limited());
  EXPECT_EQ(take(cadence, 1, 10).size(), 10u);
  cadence.learn(costs(35'000));  // 3.5 %: every 4th step
  EXPECT_EQ(cadence.proposal(), 3);
  const std::vector<int64_t> expected{11, 12, 16, 20, 24, 28};  // 11 carries the proposal
  EXPECT_EQ(take(cadence, 11, 20), expected);
  EXPECT_EQ(cadence.every(), 4u);
  cadence.learn(costs(20'000));  // every 2nd would do, but only just
  EXPECT_EQ(cadence.proposal(), 3);
  cadence.learn(costs(3'000));
  EXPECT_EQ(cadence.proposal(), 1);
  const std::vector<int64_t> again{32, 36, 37, 38, 39, 40};
  EXPECT_EQ(take(cadence, 31, 10), again);
}

TEST(Cadence, NoiseDoesNotMakeSnapshotsRarer) {
  Cadence cadence(limited());
  cadence.learn(costs(25'000, 16'000));
  EXPECT_EQ(cadence.proposal(), 1);
  cadence.learn({});
  EXPECT_EQ(cadence.proposal(), 1);
}

TEST(Cadence, IsBoundedByStepsAndByTime) {
  Cadence steps(limited());
  steps.learn(costs(90'000'000));
  EXPECT_EQ(steps.proposal(), Cadence::kMostProposal);
  CadenceOptions options = limited();
  options.longest_ns = 9'000'000;  // nine steps
  Cadence time(options);
  time.learn(costs(90'000'000));
  EXPECT_EQ(time.proposal(), 4);  // every 8th
}

TEST(Cadence, SaysThatTheLongestIntervalIsNotEnough) {
  Cadence cadence({.base = 1, .limit_ppm = 10'000, .decides = true, .longest_ns = 4'000'000'000});
  const auto of = [](int64_t ppm) {
    return Overhead{.known = true, .ppm = ppm, .noise_ppm = 0, .step_ns = 1'000'000'000};
  };
  cadence.learn(of(900'000));
  EXPECT_FALSE(cadence.exceedsAtLongest());  // it may be every fourth step
  cadence.committed(0, cadence.proposal());
  for (int64_t step = 1; step < 200; ++step) {
    cadence.ask(step, true);
  }
  ASSERT_EQ(cadence.every(), 4u);
  cadence.learn(of(900'000), false);
  EXPECT_FALSE(cadence.exceedsAtLongest());  // measured at another interval
  cadence.learn(of(900'000), true);
  EXPECT_TRUE(cadence.exceedsAtLongest());
  cadence.learn(of(30'000), true);
  EXPECT_FALSE(cadence.exceedsAtLongest());
}

TEST(Cadence, WhoDoesNotDecideProposesNothingAndFollows) {
  Cadence cadence(limited(/*decides=*/false));
  cadence.learn(costs(90'000));
  EXPECT_EQ(cadence.proposal(), 0);
  cadence.committed(1, 2);
  cadence.committed(2, 0);                           // nothing said
  cadence.committed(3, Cadence::kMostProposal + 1);  // nonsense
  EXPECT_EQ(cadence.ask(4, true), Cadence::Answer::kTake);
  EXPECT_EQ(cadence.ask(5, true), Cadence::Answer::kLeave);
  cadence.committed(0, 1);  // an older commit that comes late
  EXPECT_EQ(cadence.ask(6, true), Cadence::Answer::kTake);
  EXPECT_EQ(cadence.every(), 2u);
}

TEST(Cadence, InDoubtOnlyStepsOfEveryIntervalAreTaken) {
  Cadence cadence(limited());
  for (int64_t step = 1; step <= 200; ++step) {
    EXPECT_EQ(cadence.ask(step, false),
              step % 64 == 0 ? Cadence::Answer::kTake : Cadence::Answer::kVoteAgainst);
  }
}

// Ranks, slots and an agent that dies now and then: whatever happens, no rank leaves out a step
// that another one takes.
class Cluster {
 public:
  Cluster(size_t ranks, int slots, uint32_t seed) : random_(seed) {
    for (size_t i = 0; i < ranks; ++i) {
      ranks_.emplace_back(slots, i == 0);
    }
    startAgent();
  }

  void turn() {
    Rank& rank = ranks_[random_() % ranks_.size()];
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2: work(rank); break;
      case 3:
      case 4: deliverVote(rank); break;
      case 5:
      case 6: deliverOutcome(rank); break;
      default:
        if (random_() % 40 == 0) {
          startAgent();
        } else if (random_() % 10 == 0) {
          ranks_[0].cadence.learn(costs(static_cast<int64_t>(random_() % 5) * 20'000));
        }
    }
  }

  void expectAgreement() const {
    for (const auto& [step, answers] : answers_) {
      EXPECT_FALSE(answers.contains(Cadence::Answer::kTake) &&
                   answers.contains(Cadence::Answer::kLeave))
          << "step " << step;
    }
  }
  size_t commits() const { return commits_.size(); }
  bool anyLeft() const {
    return std::any_of(answers_.begin(), answers_.end(), [](const auto& entry) {
      return entry.second.contains(Cadence::Answer::kLeave);
    });
  }

 private:
  struct Vote {
    int64_t step;
    bool sealed;
    uint8_t proposal;
  };
  struct Outcome {
    int64_t step;
    bool committed;
    uint8_t proposal;
  };
  struct Held {
    int64_t step = SlotBook::kNone;
    uint8_t proposal = 0;
  };
  struct Rank {
    Rank(int slots, bool decides)
        : book(slots), cadence(limited(decides)), vault(static_cast<size_t>(slots)) {}
    SlotBook book;
    Cadence cadence;
    std::vector<Held> vault;
    std::deque<Vote> to_agent, unanswered;
    std::deque<Outcome> from_agent;
    int64_t step = 0;
    uint8_t proposal = 0;
    std::optional<int> writing;
  };

  void work(Rank& rank) {
    if (rank.writing) {
      const bool good = random_() % 10 != 0;
      if (good) {
        rank.vault[static_cast<size_t>(*rank.writing)] = {rank.step, rank.proposal};
        rank.book.sealed(*rank.writing);
      } else {
        rank.book.dropped(*rank.writing);
      }
      rank.writing.reset();
      vote(rank, good, good ? rank.proposal : uint8_t{0});
      return;
    }
    // A step ends on all ranks together: nobody is two steps ahead.
    if (std::any_of(ranks_.begin(), ranks_.end(),
                    [&](const Rank& other) { return other.step < rank.step; })) {
      return;
    }
    const bool known = rank.book.undecided() == 0;
    if (rank.cadence.decidesAt(rank.step + 1) && !known && random_() % 50 != 0) {
      return;  // waits a while before it gives up
    }
    ++rank.step;
    const Cadence::Answer answer = rank.cadence.ask(rank.step, known);
    answers_[rank.step].insert(answer);
    if (answer == Cadence::Answer::kTake) {
      rank.proposal = rank.cadence.proposal();
      rank.writing = rank.book.acquire(rank.step, 7);
      if (rank.writing) {
        rank.vault[static_cast<size_t>(*rank.writing)] = {};
      } else {
        vote(rank, false, 0);
      }
    } else if (answer == Cadence::Answer::kVoteAgainst) {
      vote(rank, false, 0);
    }
  }

  static void vote(Rank& rank, bool sealed, uint8_t proposal) {
    rank.to_agent.push_back({rank.step, sealed, proposal});
    rank.unanswered.push_back({rank.step, sealed, proposal});
  }

  void deliverVote(Rank& rank) {
    if (!rank.to_agent.empty()) {
      const Vote vote = rank.to_agent.front();
      rank.to_agent.pop_front();
      act(ledger_->vote(static_cast<int>(&rank - ranks_.data()), {vote.step, 7},
                        {vote.sealed, 0, vote.proposal}));
    }
  }

  static void deliverOutcome(Rank& rank) {
    if (!rank.from_agent.empty()) {
      const Outcome outcome = rank.from_agent.front();
      rank.from_agent.pop_front();
      rank.book.outcome(outcome.step, 7, outcome.committed);
      if (outcome.committed) {
        rank.cadence.committed(outcome.step, outcome.proposal);
      }
      // As the agent's client does.
      std::erase_if(rank.unanswered, [&](const Vote& vote) {
        return vote.step == outcome.step || (outcome.committed && vote.step < outcome.step);
      });
    }
  }

  void act(const std::vector<CommitLedger::Action>& actions) {
    for (const auto& action : actions) {
      if (action.yes) {
        commits_.insert(action.key.step);
      }
      for (size_t i = 0; i < ranks_.size(); ++i) {
        if (action.kind == CommitLedger::Action::kBroadcast || action.rank == static_cast<int>(i)) {
          ranks_[i].from_agent.push_back({action.key.step, action.yes, action.proposal});
        }
      }
    }
  }

  // The old agent is gone with everything under way; the ranks connect to a new one.
  void startAgent() {
    ledger_.emplace([this](int rank, const CommitKey& key) {
      for (const Held& held : ranks_[static_cast<size_t>(rank)].vault) {
        if (held.step == key.step) {
          return CommitLedger::Held{true, 0, held.proposal};
        }
      }
      return CommitLedger::Held{};
    });
    ledger_->expect(7, static_cast<int>(ranks_.size()), false);
    for (Rank& rank : ranks_) {
      rank.to_agent.clear();
      rank.from_agent.clear();
    }
    for (size_t i = 0; i < ranks_.size(); ++i) {
      std::vector<std::pair<CommitKey, CommitLedger::Held>> keys;
      for (const Held& held : ranks_[i].vault) {
        if (held.step != SlotBook::kNone) {
          keys.push_back({{held.step, 7}, {true, 0, held.proposal}});
        }
      }
      act(ledger_->vaultHolds(static_cast<int>(i), keys));
      ranks_[i].to_agent = ranks_[i].unanswered;
    }
  }

  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::optional<CommitLedger> ledger_;
  std::map<int64_t, std::set<Cadence::Answer>> answers_;
  std::set<int64_t> commits_;
};

class CadenceProtocol : public ::testing::TestWithParam<int> {};

TEST_P(CadenceProtocol, NoRankLeavesOutWhatAnotherOneTakes) {
  int with_rare_snapshots = 0;
  for (uint32_t seed = 0; seed < 150; ++seed) {
    Cluster cluster(2 + seed % 3, GetParam(), seed);
    for (int turn = 0; turn < 4000; ++turn) {
      cluster.turn();
    }
    cluster.expectAgreement();
    EXPECT_GT(cluster.commits(), 3u) << seed;  // few where snapshots were rare
    with_rare_snapshots += cluster.anyLeft() ? 1 : 0;
    if (HasFailure()) {
      GTEST_FAIL() << "seed " << seed;
    }
  }
  EXPECT_GT(with_rare_snapshots, 100);
}

INSTANTIATE_TEST_SUITE_P(Slots, CadenceProtocol, ::testing::Values(2, 3));

}  // namespace cadence_test
}  // namespace reft
