#include "snapshot/restore/plan.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>

#include "intercept/base/error.h"
#include "intercept/record/cut.h"

namespace reft {

namespace {

// When the job began that saved a step, and the number of its ranks; step; incarnation.
using Key = std::tuple<uint64_t, int, int64_t, uint64_t>;

constexpr uint64_t kMostTags = uint64_t{1} << 24;  // PeerTransport tells as many apart

// One (step, incarnation) as found: rank → its slot.
using Found = std::map<int, std::pair<const VaultSummary*, const SlotSummary*>>;

std::string listOf(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : " ") + std::to_string(rank);
  }
  return text;
}

std::vector<int> blocksOf(int ranks, int local_world) {
  std::vector<int> nodes;
  for (int rank = 0; rank < ranks; ++rank) {
    nodes.push_back(rank / local_world);
  }
  return nodes;
}

// A group while its members' summaries are gathered.
struct Gathered {
  std::shared_ptr<const SharedGroup> shared;
  std::string protection;
  uint64_t layout = 0;
  std::optional<uint64_t> digest;
  StoredShards stored;
  std::map<uint32_t, std::vector<uint32_t>> set_of;  // by member
};

using Groups = std::map<std::string, Gathered>;

// The highest rank that the snapshot knows of.
int highestRank(const Found& found) {
  int highest = found.rbegin()->first;
  for (const auto& [rank, where] : found) {
    for (const GroupSummary& group : where.second->groups) {
      if (!group.shared->ranks.empty()) {
        highest = std::max(highest, group.shared->ranks.back());
      }
    }
  }
  return highest;
}

// Fills `groups` or returns why the members do not fit together.
std::optional<std::string> gather(const Found& found, Groups& groups) {
  for (const auto& [rank, where] : found) {
    for (const GroupSummary& group : where.second->groups) {
      const std::string& id = group.shared->id;
      const std::vector<int>& ranks = group.shared->ranks;
      const auto [at, added] = groups.try_emplace(id);
      Gathered& gathered = at->second;
      if (added) {
        gathered.shared = group.shared;
        gathered.protection = where.second->protection;
        gathered.layout = group.layout;
        gathered.stored.resize(ranks.size());
      } else if (gathered.shared != group.shared && gathered.shared->ranks != ranks) {
        return "members disagree about who shares group " + id;
      } else if (gathered.layout != group.layout ||
                 (gathered.shared != group.shared &&
                  gathered.shared->empty != group.shared->empty)) {
        return "members disagree about what group " + id + " shares";
      }
      if (group.digest == 0) {
        // Not recorded: a vault keeps the digests of its first groups only.
      } else if (!gathered.digest) {
        gathered.digest = group.digest;
      } else if (*gathered.digest != group.digest) {
        return "replicas of group " + id + " differed at that step (rank " + std::to_string(rank) +
               " against another member): silent data corruption or state that is not a replica";
      }
      const auto member = std::lower_bound(ranks.begin(), ranks.end(), rank);
      if (member == ranks.end() || *member != rank) {
        return "rank " + std::to_string(rank) + " is not a member of its group " + id;
      }
      const auto number = static_cast<uint32_t>(member - ranks.begin());
      gathered.stored[number] = group.shards;
      if (!group.parity_set.empty()) {
        for (const uint32_t other : group.parity_set) {
          const auto [known, first] = gathered.set_of.try_emplace(other, group.parity_set);
          if (!first && known->second != group.parity_set) {
            return "members disagree about the parity sets of group " + id;
          }
        }
        if (!std::ranges::count(group.parity_set, number)) {
          return "rank " + std::to_string(rank) + " is not in its parity set of group " + id;
        }
      }
    }
  }
  return std::nullopt;
}

// Fills the plan's groups or names what is lost. `tag`: the next one that is free.
std::optional<std::string> findRecipes(const Groups& groups, RestorePlan& plan, uint32_t& tag) {
  for (const auto& [id, gathered] : groups) {
    GroupPlan& group = plan.groups[id];
    group.ranks = gathered.shared->ranks;
    const Protection* protection = nullptr;
    try {
      protection = &Protection::named(gathered.protection);
    } catch (const InvalidArgument& error) {
      return "group " + id + ": " + error.what();
    }
    const std::vector<uint32_t>& empty = gathered.shared->empty;
    StoredShards stored = gathered.stored;
    for (const uint32_t shard : empty) {  // no member is lost for want of one
      if (shard < stored.size() && !std::ranges::binary_search(stored[shard], shard)) {
        stored[shard].insert(std::ranges::lower_bound(stored[shard], shard), shard);
      }
    }
    ParitySets sets;
    for (const auto& [member, set] : gathered.set_of) {
      if (member == set.front()) {
        sets.push_back(set);
      }
    }
    group.recipes = protection->recipes(stored, sets);
    group.digest = gathered.digest.value_or(0);
    for (uint32_t shard = 0; shard < group.recipes.size(); ++shard) {
      if (std::binary_search(empty.begin(), empty.end(), shard)) {
        group.recipes[shard].clear();
      } else if (group.recipes[shard].empty()) {
        return "shard " + std::to_string(shard) + " of group " + id + " is not sealed anywhere";
      }
      for (const Recipe& recipe : group.recipes[shard]) {
        group.most_parts = std::max(group.most_parts, static_cast<uint32_t>(recipe.parts.size()));
      }
    }
    group.first_tag = tag;
    const uint64_t next = tag + uint64_t{group.recipes.size()} * group.most_parts;
    if (next > kMostTags) {
      return "group " + id + " has too many parts to be sent";
    }
    tag = static_cast<uint32_t>(next);
  }
  return std::nullopt;
}

// The ids of a rank's groups, ascending.
using Membership = std::vector<std::string_view>;

// A lost rank comes back if a rank that is left is a member of the same groups: the lowest one is
// its donor. What else the lost rank had is unknown: it may have been in a group of which all
// members are lost, or had regions of its own. So no rank of the same groups may have such regions,
// and the lost rank compares what it has with what its donor had (python/reft/_session/resumer.py).
std::optional<std::string> findDonors(const std::vector<int>& missing, const Found& found,
                                      const Groups& groups, RestorePlan& plan) {
  if (missing.empty()) {
    return std::nullopt;
  }
  struct Members {
    int lowest = -1;
    int owner = -1;  // of a region of its own
  };
  std::map<Membership, Members> alike;
  for (const auto& [rank, where] : found) {
    Membership of;
    for (const GroupSummary& group : where.second->groups) {
      of.push_back(group.shared->id);
    }
    std::sort(of.begin(), of.end());
    Members& members = alike.try_emplace(std::move(of), Members{rank}).first->second;
    if (members.owner < 0 && !where.second->only_here.empty()) {
      members.owner = rank;
    }
  }
  std::map<int, Membership> lost;
  for (const int rank : missing) {
    lost.emplace(rank, Membership());
  }
  for (const auto& [id, group] : groups) {
    for (const int rank : group.shared->ranks) {
      if (const auto at = lost.find(rank); at != lost.end()) {
        at->second.push_back(id);
      }
    }
  }
  for (const auto& [rank, of] : lost) {
    if (of.empty()) {
      return "nothing of rank(s) " + listOf(missing) + " is sealed anywhere";
    }
    const auto members = alike.find(of);
    if (members == alike.end()) {
      return "no rank is left that shared all that rank " + std::to_string(rank) + " did";
    }
    if (const int owner = members->second.owner; owner >= 0) {
      return "rank " + std::to_string(rank) + " may have had state that no other rank has, as " +
             found.at(owner).second->only_here + " of rank " + std::to_string(owner);
    }
    plan.donor[rank] = members->second.lowest;
    plan.replaced.push_back(rank);
  }
  return std::nullopt;
}

// Intact shards and parities of all groups.
int64_t partsOf(const SlotSummary& slot) {
  int64_t parts = 0;
  for (const GroupSummary& group : slot.groups) {
    parts += static_cast<int64_t>(group.shards.size());
  }
  return parts;
}

// n if the ranks, of `world`, are all that have the same remainder by n; 0 if they are not.
int partsBy(const std::vector<int>& ranks, int world) {
  const int count = static_cast<int>(ranks.size());
  const int parts = count > 0 && world % count == 0 ? world / count : 0;
  for (int i = 0; i < count && parts > 0; ++i) {
    if (ranks[static_cast<size_t>(i)] != ranks[0] + i * parts) {
      return 0;
    }
  }
  return parts > 0 && ranks[0] < parts ? parts : 0;
}

// Gives all ranks a donor, or returns why another number of ranks cannot go on. Which part of a
// model a rank of now has is not known here, so each rank of then must have had all of it, but for
// what all ranks split by rows. `tag`: the first one that is free.
std::optional<std::string> resize(const Found& found, RestorePlan& plan, uint32_t tag) {
  const std::string as_many =
      "start " + std::to_string(plan.savedBy()) + " ranks to resume from it";
  int parts = 1;
  for (const auto& [id, group] : plan.groups) {
    if (static_cast<int>(group.ranks.size()) == plan.savedBy()) {
      continue;
    }
    const int each = partsBy(group.ranks, plan.savedBy());
    if (each == 0 || (parts > 1 && each != parts)) {
      return std::to_string(plan.savedBy()) + " ranks saved it, of which " +
             std::to_string(group.ranks.size()) + " share a part that the others have not (group " +
             id + "): " + as_many;
    }
    parts = each;
  }
  if (plan.shape.world % parts != 0) {
    return std::to_string(plan.savedBy()) + " ranks saved it, which had a model in " +
           std::to_string(parts) + " parts: start a multiple of " + std::to_string(parts) +
           " ranks to resume from it";
  }
  for (const auto& [rank, where] : found) {
    const std::string& region = where.second->indivisible;
    if (!region.empty() && plan.savedBy() > 1) {  // what a single rank has is all that there is
      return std::to_string(plan.savedBy()) + " ranks saved it, and " + region + " of rank " +
             std::to_string(rank) + " is a part that no other rank has: " + as_many;
    }
  }
  const uint64_t splits = found.begin()->second.second->splits;
  const bool are_alike = std::ranges::all_of(
      found, [splits](const auto& entry) { return entry.second.second->splits == splits; });
  if (!are_alike || (splits != 0 && static_cast<int>(found.size()) != plan.savedBy())) {
    return std::to_string(plan.savedBy()) + " ranks saved it, which had rows of " +
           (are_alike ? "tensors, and those of some are lost" : "different tensors") + ": " +
           as_many;
  }
  if (splits != 0) {
    if (uint64_t{tag} + static_cast<uint64_t>(plan.savedBy()) > kMostTags) {
      return std::to_string(plan.savedBy()) + " ranks saved it, which are too many: " + as_many;
    }
    plan.rows_tag = tag;
  }
  std::map<int, int> donor;
  for (int rank = 0; rank < plan.shape.world; ++rank) {
    donor[rank] = plan.ownerFor(rank % plan.savedBy());
  }
  std::erase_if(plan.replaced, [&plan](int rank) { return rank >= plan.shape.world; });
  plan.donor = std::move(donor);
  return std::nullopt;
}

// Fills `plan` or returns why not. `found` may hold ranks that the job has no longer.
std::optional<std::string> tryPlan(const Found& found,
                                   const std::multimap<int, const VaultSummary*>& vaults, int world,
                                   RestorePlan& plan) {
  if (const int highest = highestRank(found); highest >= world) {
    return "it was made by at least " + std::to_string(int64_t{highest} + 1) +
           " ranks, and there are " + std::to_string(world) +
           " now: start as many as before to resume from it";
  }
  plan.vaults.assign(static_cast<size_t>(world), {});
  std::vector<int> missing;
  uint64_t cut = 0;
  for (int rank = 0; rank < world; ++rank) {
    const auto at = found.find(rank);
    if (at == found.end()) {
      missing.push_back(rank);
      continue;
    }
    const auto& [vault, slot] = at->second;
    plan.vaults[static_cast<size_t>(rank)] = {vault->node, slot->slot, vault->is_copy};
    cut = CutCounter::combine(cut, at->second.second->cut);
  }
  // A rank whose vault was there but is without this step was killed before it sealed: only an
  // older step is exact for it.
  for (const int rank : missing) {
    const auto [begin, end] = vaults.equal_range(rank);
    if (std::any_of(begin, end, [&plan, world](const auto& entry) {
          return (entry.second->world == 0 || entry.second->world == world) &&
                 entry.second->wasThere(plan.step, plan.incarnation);
        })) {
      return "rank " + std::to_string(rank) + " has not sealed it";
    }
  }
  if (missing.empty() && !CutCounter::consistent(cut)) {
    return "the ranks were at different points of the program (a message was under way, or they "
           "count steps "
           "differently)";
  }
  Groups groups;
  if (auto reason = gather(found, groups)) {
    return reason;
  }
  uint32_t tag = 1;  // 0: the private part
  if (auto reason = findRecipes(groups, plan, tag)) {
    return reason;
  }
  if (auto reason = findDonors(missing, found, groups, plan)) {
    return reason;
  }
  return plan.isResized() ? resize(found, plan, tag) : std::nullopt;
}

// The recipe by which `receiver` gets a shard: from its owner's vault, else from vaults of its
// node, else from other nodes. Receivers are spread over the sources.
const Recipe& choose(const RestorePlan& plan, const GroupPlan& group, uint32_t shard,
                     int receiver) {
  const std::vector<Recipe>& recipes = group.recipes[shard];
  const int owner = plan.ownerFor(receiver);
  std::vector<const Recipe*> near;
  for (const Recipe& recipe : recipes) {
    const auto lies_near = [&](const StoredPart& part) {
      return plan.isNear(group.ranks[part.member], receiver);
    };
    if (std::all_of(recipe.parts.begin(), recipe.parts.end(), lies_near)) {
      if (recipe.parts.size() == 1 && group.ranks[recipe.parts[0].member] == owner) {
        return recipe;
      }
      near.push_back(&recipe);
    }
  }
  return near.empty() ? recipes[static_cast<size_t>(receiver) % recipes.size()]
                      : *near[shard % near.size()];
}

MoveSource sourceOf(const RestorePlan& plan, int receiver, int vault, uint32_t shard,
                    uint32_t tag) {
  MoveSource source;
  source.vault = vault;
  source.slot = plan.vaults[static_cast<size_t>(vault)].slot;
  source.shard = shard;
  if (plan.isNear(vault, receiver)) {
    source.kind = vault == receiver && !plan.isResized() ? MoveSource::Kind::kOwnVault
                                                         : MoveSource::Kind::kLocalVault;
    source.reader = receiver;
  } else {
    source.kind = MoveSource::Kind::kPeer;
    source.reader = plan.readerOf(vault);
    source.tag = tag;
  }
  return source;
}

// Whether some recipe of the shard has a part that `rank` reads for others.
bool readsPartOf(const RestorePlan& plan, const GroupPlan& group, uint32_t shard, int rank) {
  const std::vector<Recipe>& recipes = group.recipes[shard];
  return std::any_of(recipes.begin(), recipes.end(), [&](const Recipe& recipe) {
    return std::any_of(recipe.parts.begin(), recipe.parts.end(), [&](const StoredPart& part) {
      return plan.readerOf(group.ranks[part.member]) == rank;
    });
  });
}

// From each vault, the rows that its rank had and `rank` has now.
void addRows(const RestorePlan& plan, int rank, const SnapshotTable& table,
             std::vector<Move>& moves) {
  std::map<std::string_view, uint32_t> region_of;
  for (uint32_t region = 0; region < table.regions.size(); ++region) {
    region_of.emplace(table.regions[region].name, region);
  }
  for (int vault = 0; vault < plan.savedBy(); ++vault) {
    Move move{-1,
              0,
              Decode::kCopy,
              {sourceOf(plan, rank, vault, 0, plan.rows_tag + static_cast<uint32_t>(vault))},
              {}};
    for (const RowsFor& rows : rowsFor(plan, table.splits, vault, rank)) {
      const uint32_t region = region_of.at(table.splits[rows.split].name);
      move.ranges.push_back({region, rows.to, rows.to + rows.bytes});
      move.from.push_back(rows.from);
    }
    moves.push_back(std::move(move));
  }
}

// Calls fn(group id, group, shard, recipe) for each shard that `receiver` takes, in the order of
// all ranks.
template <typename Fn>
void forEachShard(const RestorePlan& plan, int receiver, Fn fn) {
  const int owner = plan.ownerFor(receiver);
  for (const auto& [id, group] : plan.groups) {
    if (!std::binary_search(group.ranks.begin(), group.ranks.end(), owner)) {
      continue;
    }
    for (uint32_t shard = 0; shard < group.recipes.size(); ++shard) {
      if (!group.recipes[shard].empty()) {
        fn(id, group, shard, choose(plan, group, shard, receiver));
      }
    }
  }
}

}  // namespace

RowRange RestorePlan::rowsNow(const SplitTensor& split, int rank) const {
  const int parts = row_parts > 0 ? row_parts : shape.world;
  return rowsOf(split.shape[0], parts, rank % parts);
}

int RestorePlan::ownerFor(int rank) const {
  const auto at = donor.find(rank);
  return at == donor.end() ? rank : at->second;
}

bool RestorePlan::takesOwn(int rank) const {
  return !isResized() && isNear(rank, rank) && !vaults[static_cast<size_t>(rank)].is_copy;
}

bool RestorePlan::isNear(int vault, int rank) const {
  return vaults[static_cast<size_t>(vault)].node == shape.nodeOf(rank);
}

int RestorePlan::readerOf(int vault) const {
  const int node = vaults[static_cast<size_t>(vault)].node;
  return vault < shape.world && shape.nodeOf(vault) == node ? vault : shape.firstOf(node);
}

JobShape::JobShape(std::vector<int> nodes)
    : world(static_cast<int>(nodes.size())), node_of(std::move(nodes)) {
  for (int rank = 0; rank < world; ++rank) {
    const int node = nodeOf(rank);
    if (node < 0 || node >= world) {
      throw InvalidArgument("node", std::to_string(node), "0.." + std::to_string(world - 1));
    }
    if (static_cast<size_t>(node) >= first_of.size()) {
      first_of.resize(static_cast<size_t>(node) + 1, -1);
    }
    int& first = first_of[static_cast<size_t>(node)];
    first = first < 0 ? rank : first;
  }
}

JobShape::JobShape(int ranks, int local_world) : JobShape(blocksOf(ranks, local_world)) {}

int JobShape::firstOf(int node) const {
  return node < 0 || static_cast<size_t>(node) >= first_of.size()
             ? -1
             : first_of[static_cast<size_t>(node)];
}

namespace {

// Whether the step of `plan` lies before that of `newer` on the same line, and not on one that was
// left: of the same attempt, or what that attempt has resumed from.
bool isBefore(const std::vector<VaultSummary>& vaults, const RestorePlan& plan,
              const RestorePlan& newer) {
  return plan.incarnation == newer.incarnation ||
         std::ranges::any_of(vaults, [&](const VaultSummary& vault) {
           return vault.writer == newer.incarnation && vault.resumed == plan.step;
         });
}

}  // namespace

RestoreDecision planRestore(const std::vector<VaultSummary>& vaults, const JobShape& shape,
                            int64_t below) {
  RestoreDecision result;
  std::map<Key, Found> candidates;
  std::multimap<int, const VaultSummary*> by_rank;
  const auto worldOf = [&shape](const VaultSummary& vault) {
    return vault.world > 0 ? vault.world : shape.world;
  };
  std::map<int, uint64_t> since;  // by number of ranks
  for (const VaultSummary& vault : vaults) {
    uint64_t& newest = since[worldOf(vault)];
    newest = std::max(newest, vault.since);
  }
  for (const VaultSummary& vault : vaults) {
    if (shape.firstOf(vault.node) < 0) {
      continue;  // nobody could read it
    }
    by_rank.emplace(vault.rank, &vault);
    const int world = worldOf(vault);
    for (const SlotSummary& slot : vault.slots) {
      if (vault.rank >= 0 && slot.step < below) {
        // There may be several vaults of a rank (it moved, or one is a copy): the one with most
        // intact parts is taken, then that on the rank's node, then one that is no copy, then that
        // of the lower node number, on every rank alike.
        auto [at, added] =
            candidates[{since[world], world, slot.step, slot.incarnation}].try_emplace(
                vault.rank, &vault, &slot);
        const auto order = [&](const VaultSummary& one, const SlotSummary& of) {
          const bool near = vault.rank < shape.world && shape.nodeOf(vault.rank) == one.node;
          return std::tuple(-partsOf(of), !near, one.is_copy, one.node);
        };
        if (!added && order(vault, slot) < order(*at->second.first, *at->second.second)) {
          at->second = {&vault, &slot};
        }
      }
    }
  }
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    RestorePlan plan;
    int world = 0;
    std::tie(std::ignore, world, plan.step, plan.incarnation) = candidate->first;
    plan.shape = shape;
    if (result.plan && !isBefore(vaults, plan, *result.plan)) {
      continue;
    }
    if (const auto reason = tryPlan(candidate->second, by_rank, world, plan)) {
      if (!result.plan) {
        result.rejected.push_back("step " + std::to_string(plan.step) + ": " + *reason);
      }
    } else if (plan.replaced.empty()) {
      if (result.plan) {
        result.rejected.push_back("step " + std::to_string(result.plan->step) +
                                  ": the small state of ranks is lost, and step " +
                                  std::to_string(plan.step) + " has all of it");
      }
      result.plan = std::move(plan);
      return result;
    } else if (!result.plan) {
      result.plan = std::move(plan);  // unless an older step is whole
    }
  }
  return result;
}

std::vector<ShardRange> rangesOf(const SnapshotTable& table, const std::string& group,
                                 uint32_t shard) {
  std::vector<ShardRange> ranges;
  if (group.empty()) {
    const std::set<std::string_view> without =
        shard == kUnsplit ? table.splitNames() : std::set<std::string_view>();
    for (uint32_t region = 0; region < table.regions.size(); ++region) {
      if (table.regions[region].group < 0 && table.regions[region].bytes > 0 &&
          !without.contains(table.regions[region].name)) {
        ranges.push_back({region, 0, table.regions[region].bytes});
      }
    }
    return ranges;
  }
  for (size_t g = 0; g < table.groups.size(); ++g) {
    if (table.groups[g].id == group && shard < table.groups[g].ranks.size()) {
      return shardRanges(table.regions, static_cast<int32_t>(g), shard,
                         static_cast<uint32_t>(table.groups[g].ranks.size()));
    }
  }
  return ranges;
}

SnapshotTable tableOf(const RestorePlan& plan, int rank, const SnapshotTable& saved) {
  SnapshotTable table;
  table.rank = rank;
  table.world = plan.shape.world;
  table.protection = saved.protection;
  table.groups = saved.groups;
  table.splits = saved.splits;
  std::map<std::string_view, const SplitTensor*> by_name;
  for (const SplitTensor& split : saved.splits) {
    by_name.emplace(split.name, &split);
  }
  // Where the owner had them, and behind them what it had no rows of: the order does not matter.
  const auto add = [&](const SplitTensor& split, const RegionInfo* had) {
    const RowRange own = plan.rowsNow(split, rank);
    if (own.begin < own.end) {
      RegionInfo region;
      if (had != nullptr) {
        region = *had;
      }
      region.name = split.name;
      region.dtype = split.dtype;
      region.shape = split.shape;
      region.shape[0] = own.end - own.begin;
      region.bytes = static_cast<uint64_t>(region.shape[0]) * split.row_bytes;
      region.row_bytes = split.row_bytes;
      table.regions.push_back(std::move(region));
    }
  };
  for (const RegionInfo& region : saved.regions) {
    if (const auto at = by_name.find(region.name); at != by_name.end()) {
      add(*at->second, &region);
      by_name.erase(at);
    } else {
      table.regions.push_back(region);
    }
  }
  for (const auto& [name, split] : by_name) {
    add(*split, nullptr);
  }
  return table;
}

std::vector<RowsFor> rowsFor(const RestorePlan& plan, const std::vector<SplitTensor>& splits,
                             int vault, int rank) {
  std::vector<RowsFor> found;
  for (uint32_t i = 0; i < splits.size(); ++i) {
    const SplitTensor& split = splits[i];
    const RowRange had = rowsOf(split.shape[0], plan.savedBy(), vault);
    const RowRange has = plan.rowsNow(split, rank);
    const int64_t begin = std::max(had.begin, has.begin), end = std::min(had.end, has.end);
    if (begin < end) {
      const auto bytes = [&](int64_t rows) {
        return static_cast<uint64_t>(rows) * split.row_bytes;
      };
      found.push_back({i, bytes(begin - had.begin), bytes(begin - has.begin), bytes(end - begin)});
    }
  }
  return found;
}

std::vector<Move> movesOf(const RestorePlan& plan, int rank, const SnapshotTable& table) {
  std::vector<Move> moves;
  const uint32_t own = plan.privatePart();
  moves.push_back({-1,
                   own,
                   Decode::kCopy,
                   {sourceOf(plan, rank, plan.ownerFor(rank), own, 0)},
                   rangesOf(table, "", own)});
  if (plan.rows_tag > 0) {
    addRows(plan, rank, table, moves);
  }
  std::map<std::string, int32_t> index_of;
  for (size_t g = 0; g < table.groups.size(); ++g) {
    index_of.emplace(table.groups[g].id, static_cast<int32_t>(g));
  }
  forEachShard(
      plan, rank,
      [&](const std::string& id, const GroupPlan& group, uint32_t shard, const Recipe& recipe) {
        Move move{index_of.contains(id) ? index_of.at(id) : -1,
                  shard,
                  recipe.decode,
                  {},
                  rangesOf(table, id, shard)};
        for (size_t i = 0; i < recipe.parts.size(); ++i) {
          const StoredPart& part = recipe.parts[i];
          move.sources.push_back(
              sourceOf(plan, rank, group.ranks[part.member], part.shard, group.tagOf(shard, i)));
        }
        moves.push_back(std::move(move));
      });
  std::stable_partition(moves.begin(), moves.end(),
                        [](const Move& move) { return move.decode == Decode::kCopy; });
  return moves;
}

std::vector<Transfer> transfersOf(const RestorePlan& plan, int rank) {
  std::vector<Transfer> transfers;
  const auto add = [&](int receiver, const std::string& group, int vault, uint32_t shard,
                       uint32_t tag, bool rows = false) {
    const MoveSource source = sourceOf(plan, receiver, vault, shard, tag);
    if (source.kind == MoveSource::Kind::kPeer && (source.reader == rank || receiver == rank)) {
      transfers.push_back({source.reader, receiver, vault, source.slot, group, shard, tag, rows});
    }
  };
  const auto addRecipe = [&](int receiver, const std::string& id, const GroupPlan& group,
                             uint32_t shard, const Recipe& recipe) {
    for (size_t i = 0; i < recipe.parts.size(); ++i) {
      const StoredPart& part = recipe.parts[i];
      add(receiver, id, group.ranks[part.member], part.shard, group.tagOf(shard, i));
    }
  };
  const uint32_t own = plan.privatePart();
  // What it receives.
  add(rank, "", plan.ownerFor(rank), own, 0);
  forEachShard(plan, rank,
               [&](const std::string& id, const GroupPlan& group, uint32_t shard,
                   const Recipe& recipe) { addRecipe(rank, id, group, shard, recipe); });
  // What it sends: only shards of which it reads a part, to all that take the group.
  for (int receiver = 0; receiver < plan.shape.world; ++receiver) {
    if (receiver != rank) {
      add(receiver, "", plan.ownerFor(receiver), own, 0);
    }
  }
  for (int vault = 0; vault < plan.savedBy() && plan.rows_tag > 0; ++vault) {
    const uint32_t tag = plan.rows_tag + static_cast<uint32_t>(vault);
    add(rank, "", vault, 0, tag, true);
    const bool is_reader = plan.readerOf(vault) == rank;
    for (int receiver = 0; receiver < plan.shape.world && is_reader; ++receiver) {
      if (receiver != rank) {
        add(receiver, "", vault, 0, tag, true);
      }
    }
  }
  for (const auto& [id, group] : plan.groups) {
    std::vector<uint32_t> readable;
    for (uint32_t shard = 0; shard < group.recipes.size(); ++shard) {
      if (readsPartOf(plan, group, shard, rank)) {
        readable.push_back(shard);
      }
    }
    for (int receiver = 0; receiver < plan.shape.world && !readable.empty(); ++receiver) {
      if (receiver == rank ||
          !std::binary_search(group.ranks.begin(), group.ranks.end(), plan.ownerFor(receiver))) {
        continue;
      }
      for (const uint32_t shard : readable) {
        addRecipe(receiver, id, group, shard, choose(plan, group, shard, receiver));
      }
    }
  }
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return std::pair(a.receiver, a.tag) < std::pair(b.receiver, b.tag);
  });
  return transfers;
}

}  // namespace reft
