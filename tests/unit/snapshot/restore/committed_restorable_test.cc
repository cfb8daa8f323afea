#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "snapshot/commit/commit_ledger.h"
#include "snapshot/restore/plan.h"
#include "snapshot/state/agreement.h"
#include "snapshot/state/parity_cells.h"

// What is committed can be restored: whatever the ranks believe about who shares what, the planner
// accepts the inventories of every step that the votes committed.

namespace reft {
namespace committed_restorable_test {

constexpr uint64_t kInc = 7;
constexpr int kHistories = 12'000;
constexpr int kSteps = 6;

// What one rank believes, and what it holds.
struct Belief {
  std::vector<GroupInfo> groups;   // all that it is a member of
  std::vector<uint64_t> contents;  // of each group
  std::vector<int> regions;        // of each group: how many regions it shares
  std::vector<int64_t> rows;       // of each group: rows of its first region
  std::vector<std::string> dtype;  // likewise
  int own = 0;                     // private regions before the shared ones
  std::string protection = "none";
};

struct Sealed {
  SnapshotTable table;
  std::vector<uint64_t> digests;
  uint64_t cut = 0;
};

class Job {
 public:
  explicit Job(uint32_t seed) : random_(seed) {
    world_ = 1 + static_cast<int>(random_() % 6);
    const int teams = static_cast<int>(random_() % 4);
    beliefs_.resize(static_cast<size_t>(world_));
    for (int team = 0; team < teams; ++team) {
      GroupInfo group{"g" + std::to_string(team), {}};
      for (int rank = 0; rank < world_; ++rank) {
        if (random_() % 3 != 0) {
          group.ranks.push_back(rank);
        }
      }
      const int regions = 1 + static_cast<int>(random_() % 3);
      const auto rows = static_cast<int64_t>(1 + random_() % 5);
      for (const int rank : group.ranks) {
        Belief& belief = beliefs_[static_cast<size_t>(rank)];
        belief.groups.push_back(group);
        belief.contents.push_back(17 + static_cast<uint64_t>(team));
        belief.regions.push_back(regions);
        belief.rows.push_back(rows);
        belief.dtype.push_back("float32");
      }
    }
    const char* const protection = std::array{"none", "arc", "aec"}[random_() % 3];
    for (Belief& belief : beliefs_) {
      belief.own = static_cast<int>(random_() % 2);
      belief.protection = protection;
    }
  }

  // Something happens, to one rank or to all members of a group alike.
  void change() {
    Belief& one = pickFrom(beliefs_);
    const auto what = random_() % 9;
    if (what == 0) {
      one.own = static_cast<int>(random_() % 3);
    } else if (what == 1) {
      one.protection = one.protection == "arc" ? "none" : "arc";
    } else if (!one.groups.empty()) {
      const size_t group = random_() % one.groups.size();
      const std::string id = one.groups[group].id;
      const bool all = random_() % 2 == 0;
      const auto amount = static_cast<int64_t>(1 + random_() % 4);
      const int other = static_cast<int>(random_() % static_cast<size_t>(world_));
      for (Belief& belief : beliefs_) {
        if (!all && &belief != &one) {
          continue;
        }
        for (size_t g = 0; g < belief.groups.size(); ++g) {
          if (belief.groups[g].id == id) {
            apply(belief, g, static_cast<int>(what), amount, other);
            break;
          }
        }
      }
    }
  }

  // All ranks take the step; those that it is committed for are judged by the planner.
  void step(int64_t step, bool check_replicas) {
    const bool two_nodes = random_() % 3 == 0 && world_ > 1;
    const int split =
        two_nodes ? 1 + static_cast<int>(random_() % static_cast<size_t>(world_ - 1)) : world_;
    CommitLedger first, second;
    first.expect(kInc, split, two_nodes);
    if (two_nodes) {
      second.expect(kInc, world_ - split, true);
    }
    std::map<int, Sealed> sealed;
    std::vector<CommitLedger::Action> actions;
    std::vector<int> order(static_cast<size_t>(world_));
    for (int rank = 0; rank < world_; ++rank) {
      order[static_cast<size_t>(rank)] = rank;
    }
    std::shuffle(order.begin(), order.end(), random_);
    const uint64_t shift = random_();
    const bool inconsistent = random_() % 20 == 0;
    for (const int rank : order) {
      CommitLedger::Held vote;
      vote.sealed = random_() % 25 != 0;
      if (vote.sealed) {
        Sealed made = seal(rank);
        // Messages between neighbours: the parts add up to 0.
        made.cut = world_ == 1 ? 0 : rank == 0 ? shift : rank == 1 ? 0 - shift : 0;
        made.cut += inconsistent && rank == 0 ? 3 : 0;
        vote.cut = made.cut;
        vote.replicas =
            check_replicas ? agreementOf(made.table, groupLayouts(made.table), made.digests) : 0;
        sealed.emplace(rank, std::move(made));
      }
      for (auto& action : (rank < split ? first : second).vote(rank, {step, kInc}, vote)) {
        actions.push_back(action);
      }
    }
    bool committed = false;
    if (two_nodes) {  // as StoreCommit adds them up
      uint64_t cut = 0, replicas = 0;
      bool all = true;
      int nodes = 0;
      for (const auto& action : actions) {
        if (action.kind == CommitLedger::Action::kNodeVote) {
          ++nodes;
          all = all && action.yes;
          cut += action.cut;
          replicas += action.replicas;
        }
      }
      committed = nodes == 2 && all && cut == 0 && replicas == 0;
    } else {
      committed = std::any_of(actions.begin(), actions.end(),
                              [](const auto& action) { return action.yes; });
    }
    commits += committed;
    aborts += !committed;
    if (committed) {
      judge(step, sealed);
    }
  }

  int commits = 0, aborts = 0;
  std::vector<std::string> refused;  // committed steps that no restart can use

 private:
  template <typename T>
  T& pickFrom(std::vector<T>& items) {
    return items[random_() % items.size()];
  }

  static void apply(Belief& belief, size_t g, int what, int64_t amount, int other) {
    std::vector<int>& ranks = belief.groups[g].ranks;
    switch (what) {
      case 2: belief.contents[g] += static_cast<uint64_t>(amount); break;
      case 3: belief.rows[g] = amount; break;
      case 4: belief.regions[g] = static_cast<int>(amount); break;
      case 5: belief.dtype[g] = amount % 2 == 0 ? "float32" : "int32"; break;
      case 6:  // believes that another rank shares it, or does not
        if (const auto at = std::lower_bound(ranks.begin(), ranks.end(), other);
            at == ranks.end() || *at != other) {
          ranks.insert(at, other);
        } else if (ranks.size() > 1) {
          ranks.erase(at);
        }
        break;
      case 7: belief.contents[g] = 17; break;
      case 8: {  // shares it no longer
        const auto at = static_cast<std::ptrdiff_t>(g);
        belief.groups.erase(belief.groups.begin() + at);
        belief.contents.erase(belief.contents.begin() + at);
        belief.regions.erase(belief.regions.begin() + at);
        belief.rows.erase(belief.rows.begin() + at);
        belief.dtype.erase(belief.dtype.begin() + at);
        break;
      }
      default: break;
    }
  }

  Sealed seal(int rank) const {
    const Belief& belief = beliefs_[static_cast<size_t>(rank)];
    std::vector<RegionInfo> regions;
    for (int i = 0; i < belief.own; ++i) {
      regions.push_back({"own" + std::to_string(i), "float32", {4}, 16, 4, -1, false});
    }
    Sealed made;
    std::vector<GroupInfo> groups;
    for (size_t g = 0; g < belief.groups.size(); ++g) {
      const std::vector<int>& ranks = belief.groups[g].ranks;
      if (ranks.size() < 2 || !std::binary_search(ranks.begin(), ranks.end(), rank)) {
        continue;  // what a rank shares with nobody is private
      }
      for (int i = 0; i < belief.regions[g]; ++i) {
        const int64_t rows = i == 0 ? belief.rows[g] : 2;
        regions.push_back({belief.groups[g].id + "." + std::to_string(i),
                           belief.dtype[g],
                           {rows, 2},
                           static_cast<uint64_t>(rows) * 8,
                           8,
                           static_cast<int32_t>(groups.size()),
                           false});
      }
      groups.push_back(belief.groups[g]);
      made.digests.push_back(belief.contents[g]);
    }
    const Protection& protection = Protection::named(belief.protection);
    std::vector<std::vector<uint32_t>> held;
    for (GroupInfo& group : groups) {
      const auto self = std::find(group.ranks.begin(), group.ranks.end(), rank);
      const MemberNodes nodes(group.ranks.size());
      held.push_back(protection.placement(nodes)[static_cast<size_t>(self - group.ranks.begin())]);
      group.sets = protection.paritySets(nodes);
    }
    made.table = buildTable(rank, world_, std::move(regions), std::move(groups), belief.protection,
                            held, 64);
    return made;
  }

  void judge(int64_t step, const std::map<int, Sealed>& sealed) {
    std::vector<VaultSummary> vaults;
    for (const auto& [rank, made] : sealed) {
      SlotSummary slot;
      slot.step = step;
      slot.incarnation = kInc;
      slot.cut = made.cut;
      slot.protection = made.table.protection;
      const std::vector<uint64_t> layouts = groupLayouts(made.table);
      for (size_t g = 0; g < made.table.groups.size(); ++g) {
        const GroupInfo& info = made.table.groups[g];
        const auto index = static_cast<int32_t>(g);
        GroupSummary group{std::make_shared<const SharedGroup>(
                               SharedGroup{info.id, info.ranks, made.table.emptyShardsOf(index)}),
                           made.table.shardsOf(index), made.digests[g], layouts[g]};
        if (made.table.holdsParityOf(index)) {
          group.shards.push_back(made.table.parityPart(index));
          group.parity_set = *paritySetOf(info, made.table.memberOf(index));
        }
        slot.groups.push_back(std::move(group));
      }
      vaults.push_back({rank, 0, {std::move(slot)}});
    }
    const RestoreDecision decision = planRestore(vaults, {world_, world_});
    if (!decision.plan || decision.plan->step != step) {
      refused.push_back(decision.rejected.empty() ? "nothing found" : decision.rejected[0]);
    }
  }

  std::mt19937 random_;
  int world_ = 1;
  std::vector<Belief> beliefs_;
};

struct Total {
  int commits = 0, aborts = 0;
  std::vector<std::string> refused;
};

Total histories(int count, bool check_replicas) {
  Total total;
  for (int seed = 0; seed < count; ++seed) {
    Job job(static_cast<uint32_t>(seed));
    for (int64_t step = 1; step <= kSteps; ++step) {
      if (step % 2 == 0) {
        job.change();
      }
      job.step(step, check_replicas);
    }
    total.commits += job.commits;
    total.aborts += job.aborts;
    total.refused.insert(total.refused.end(), job.refused.begin(), job.refused.end());
  }
  return total;
}

TEST(CommittedRestorable, ThePlannerAcceptsEveryCommittedStep) {
  const Total total = histories(kHistories, true);
  EXPECT_TRUE(total.refused.empty()) << total.refused.size() << ", first: " << total.refused[0];
  EXPECT_GT(total.commits, 2 * kHistories);
  EXPECT_GT(total.aborts, kHistories);
}

TEST(CommittedRestorable, WithoutTheCheckOfReplicasItDoesNot) {
  const Total total = histories(kHistories / 10, false);
  EXPECT_GT(total.refused.size(), 50u);
  // Each kind of disagreement is among them.
  for (const char* reason : {"who shares group", "what group", "replicas of group", "not sealed"}) {
    EXPECT_TRUE(std::any_of(
        total.refused.begin(), total.refused.end(),
        [&](const std::string& text) { return text.find(reason) != std::string::npos; }))
        << reason;
  }
}

}  // namespace committed_restorable_test
}  // namespace reft
