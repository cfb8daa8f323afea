// Jobs of 64 to 4,096 ranks (pipeline × data × tensor parallel) that are played step by step until
// nothing moves, with one fault each. The verdict has to name exactly the rank with the fault, or
// to say that it cannot tell.
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <random>

#include <gtest/gtest.h>

#include "hang_detect/report/verdict_text.h"
#include "tests/unit/hang_detect/verdict/simulated_job.h"

namespace reft {
namespace verdict_simulation_test {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace)

enum class Fault {
  kMissing,
  kStopped,
  kDead,
  kLeftEarly,
  kSkippedOp,
  kOtherOp,
  kOtherSize,
  kOtherOrder,
  kNone
};
constexpr Fault kFaults[] = {Fault::kMissing,   Fault::kStopped,    Fault::kDead,
                             Fault::kLeftEarly, Fault::kSkippedOp,  Fault::kOtherOp,
                             Fault::kOtherSize, Fault::kOtherOrder, Fault::kNone};

// One rank's script and how far it is.
struct Player {
  int rank = 0;
  std::vector<Planned> plan;
  size_t at = 0;
  bool inside = false;  // its op at `at` has begun
  size_t stops_before = SIZE_MAX;
  uint32_t seq[kGroups] = {}, messages = 0;
  std::map<std::pair<OpKind, int>, uint32_t> with_peer;
  std::vector<OpEntry> log;
};

class Simulation {
 public:
  Simulation(int tensor, int data, int stages, Fault fault, uint64_t seed, int steps)
      : layout_{tensor, data, stages},
        fault_(fault),
        steps_(static_cast<size_t>(steps)),
        random_(seed),
        rendezvous_(layout_) {
    victim_ = static_cast<int>(random_() % static_cast<uint64_t>(layout_.world()));
    for (int r = 0; r < layout_.world(); ++r) {
      Player player;
      player.rank = r;
      const std::vector<Planned> step = layout_.step(r);
      for (size_t i = 0; i < steps_; ++i) {
        player.plan.insert(player.plan.end(), step.begin(), step.end());
      }
      players_.push_back(std::move(player));
    }
    inject(players_[static_cast<size_t>(victim_)]);
  }

  HangEvidence play() {
    for (bool moved = true; moved;) {
      moved = false;
      for (Player& player : players_) {
        moved = begin(player) || moved;
      }
    }
    std::vector<RankEvidence> ranks;
    for (Player& player : players_) {
      constexpr size_t kTail = 64;
      const size_t begun = player.log.size();
      std::vector<OpEntry> tail(player.log.end() - static_cast<ptrdiff_t>(std::min(begun, kTail)),
                                player.log.end());
      RankEvidence rank = rankOf(player.rank, layout_.world(), std::move(tail));
      rank.ops_begun = begun;
      for (size_t i = 0; i + kTail < begun; ++i) {
        rank.past.push_back(pastOf(player.log[i]));
      }
      const auto groups = layout_.groupsOf(player.rank);
      rank.groups.assign(groups.begin(), groups.end());
      if (player.rank == victim_) {
        rank.proc_state = fault_ == Fault::kStopped ? "T" : "S";
        rank.alive = fault_ != Fault::kDead;
      }
      ranks.push_back(std::move(rank));
    }
    return job(std::move(ranks));
  }

  int victim() const { return victim_; }

 private:
  void inject(Player& player) {
    // Within the last step but one: there is a past, and a future that is not reached.
    const size_t step = player.plan.size() / steps_;
    size_t where = step * (steps_ - 2) + random_() % step;
    auto& plan = player.plan;
    switch (fault_) {
      case Fault::kMissing:
      case Fault::kStopped:
      case Fault::kDead: player.stops_before = where; break;
      case Fault::kLeftEarly: plan.resize(where); break;
      case Fault::kSkippedOp: plan.erase(plan.begin() + static_cast<ptrdiff_t>(where)); break;
      case Fault::kOtherOp:
      case Fault::kOtherSize:
        while (plan[where].group == kStage) {  // a collective
          ++where;
        }
        plan[where].signature = 8;
        if (fault_ == Fault::kOtherOp) {
          plan[where].kind = OpKind::kBarrier;
        }
        break;
      case Fault::kOtherOrder: std::swap(plan[where], plan[where - 1]); break;
      case Fault::kNone: break;
    }
  }

  bool begin(Player& player) {
    if (player.inside || player.at >= player.plan.size() || player.at >= player.stops_before) {
      return false;
    }
    const Planned& planned = player.plan[player.at];
    const bool p2p = planned.group == kStage;
    OpEntry entry = op(planned.kind, p2p ? ++player.messages : ++player.seq[planned.group], false,
                       planned.peer, planned.group);
    entry.signature = p2p ? 7 : planned.signature;
    player.log.push_back(entry);
    player.inside = true;
    const uint32_t number = p2p ? ++player.with_peer[{planned.kind, planned.peer}] : entry.seq;
    for (const int rank : rendezvous_.begin(player.rank, planned, number)) {
      end(players_[static_cast<size_t>(rank)]);
    }
    return true;
  }

  static void end(Player& player) {
    OpEntry& entry = player.log.back();
    entry.begin_ns -= 2'000'000'000;
    entry.enqueued_ns = entry.wait_begin_ns = entry.begin_ns;
    entry.wait_end_ns = entry.done_ns = entry.begin_ns + 1'000'000;
    player.inside = false;
    ++player.at;
  }

  Layout layout_;
  Fault fault_;
  size_t steps_;
  std::mt19937_64 random_;
  Rendezvous rendezvous_;
  int victim_ = 0;
  std::vector<Player> players_;
};

struct Score {
  int exact = 0, undecidable = 0, harmless = 0, runs = 0;
};

// Decides one simulated job, and fails if the verdict is wrong.
void judge(int tensor, int data, int stages, Fault fault, uint64_t seed,
           std::map<int, Score>& scores, int steps = 3) {
  Simulation simulation(tensor, data, stages, fault, seed, steps);
  const HangEvidence evidence = simulation.play();
  const Verdict verdict = decide(evidence);
  SCOPED_TRACE(testing::Message() << tensor << "x" << data << "x" << stages << " fault "
                                  << static_cast<int>(fault) << " seed " << seed << " rank "
                                  << simulation.victim() << "\n"
                                  << verdictText(evidence, verdict));
  Score& score = scores[static_cast<int>(fault)];
  ++score.runs;
  if (fault == Fault::kNone) {
    EXPECT_EQ(verdict.state, VerdictState::kHealthy);
    EXPECT_TRUE(verdict.culprits.empty());
    return;
  }
  if (verdict.state == VerdictState::kHealthy && verdict.culprits.empty()) {
    ++score.harmless;
    return;
  }
  if (verdict.confidence == Confidence::kUndecidable) {
    ++score.undecidable;
    EXPECT_TRUE(verdict.culprits.empty());
    return;
  }
  ++score.exact;
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{simulation.victim()});
}

void print(const std::map<int, Score>& scores) {
  static constexpr const char* kNames[] = {"missing",    "stopped",     "dead",
                                           "left early", "skipped op",  "other op",
                                           "other size", "other order", "none"};
  for (const auto& [fault, score] : scores) {
    std::printf("  %-12s %4d runs, %4d named exactly, %4d undecidable, %4d without harm\n",
                kNames[fault], score.runs, score.exact, score.undecidable, score.harmless);
  }
}

TEST(Simulation, NamesExactlyTheRankWithTheFaultOrNobody) {
  std::map<int, Score> scores;
  constexpr int kShapes[][3] = {{4, 4, 4}, {8, 8, 1},  {1, 16, 4}, {2, 2, 16},
                                {8, 1, 8}, {1, 64, 1}, {4, 8, 8}};
  for (uint64_t seed = 0; seed < 12; ++seed) {
    for (const auto& [tensor, data, stages] : kShapes) {
      for (const Fault fault : kFaults) {
        judge(tensor, data, stages, fault, seed, scores);
      }
    }
  }
  print(scores);
  for (const Fault fault : {Fault::kMissing, Fault::kStopped, Fault::kDead, Fault::kLeftEarly}) {
    EXPECT_EQ(scores[static_cast<int>(fault)].undecidable, 0) << static_cast<int>(fault);
  }
}

// After some steps, each rank's own habit shows what the ops of one step leave open.
TEST(Simulation, NamesMoreByHabitAndNobodyWrongly) {
  std::map<int, Score> scores;
  constexpr int kShapes[][3] = {{2, 2, 2}, {1, 2, 4}, {4, 1, 2}, {2, 1, 4}, {1, 1, 8}};
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (const auto& [tensor, data, stages] : kShapes) {
      for (const Fault fault : {Fault::kSkippedOp, Fault::kOtherOrder, Fault::kNone}) {
        judge(tensor, data, stages, fault, seed, scores, 8);
      }
    }
  }
  print(scores);
  for (const Fault fault : {Fault::kSkippedOp, Fault::kOtherOrder}) {
    const Score& score = scores[static_cast<int>(fault)];
    EXPECT_GT(score.exact, score.undecidable) << static_cast<int>(fault);
  }
}

TEST(Simulation, DecidesOnFourThousandRanks) {
  std::map<int, Score> scores;
  double longest = 0;
  for (const Fault fault : {Fault::kMissing, Fault::kOtherOp, Fault::kSkippedOp}) {
    Simulation simulation(8, 64, 8, fault, 1, 3);
    const HangEvidence evidence = simulation.play();
    ASSERT_EQ(evidence.ranks.size(), 4096u);
    const auto begin = std::chrono::steady_clock::now();
    const Verdict verdict = decide(evidence);
    longest = std::max(
        longest, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (verdict.confidence != Confidence::kUndecidable) {
      EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{simulation.victim()});
    }
  }
  std::printf("  4096 ranks merged and decided in at most %.0f ms\n", longest * 1e3);
}

}  // namespace verdict_simulation_test
}  // namespace reft
