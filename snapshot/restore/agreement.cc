#include "snapshot/restore/agreement.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "intercept/base/error.h"
#include "intercept/base/json_integer.h"
#include "intercept/record/cut.h"
#include "snapshot/vault/reader.h"

namespace reft {

namespace {

using Json = nlohmann::json;
using Key = std::pair<int64_t, uint64_t>;

// One (step, incarnation) as found: rank → its slot.
using Found = std::map<int, std::pair<const VaultSummary*, const SlotSummary*>>;

std::string listOf(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : " ") + std::to_string(rank);
  }
  return text;
}

// Fills `plan` or says why not. `found` may hold ranks that the job has no longer.
std::optional<std::string> tryPlan(const Found& found, const std::set<int>& present, int world,
                                   RestorePlan& plan) {
  int highest = found.rbegin()->first;
  for (const auto& [rank, where] : found) {
    for (const GroupSummary& group : where.second->groups) {
      for (const int member : group.ranks) {
        highest = std::max(highest, member);
      }
    }
  }
  if (highest >= world) {
    return "it was made by at least " + std::to_string(int64_t{highest} + 1) +
           " ranks, and there are " + std::to_string(world) +
           " now: start as many as before to resume from it";
  }
  plan.node_of_rank.assign(static_cast<size_t>(world), -1);
  std::vector<int> missing;
  for (int rank = 0; rank < world; ++rank) {
    const auto at = found.find(rank);
    if (at == found.end()) {
      missing.push_back(rank);
    } else {
      plan.node_of_rank[static_cast<size_t>(rank)] = at->second.first->node;
    }
  }
  // A rank whose vault is there but without this step was killed before it sealed: only an older
  // step is exact for it.
  for (const int rank : missing) {
    if (present.contains(rank)) {
      return "rank " + std::to_string(rank) + " has not sealed it";
    }
  }
  uint64_t cut = 0;
  for (const auto& [rank, where] : found) {
    cut = CutCounter::combine(cut, where.second->cut);
  }
  if (missing.empty() && !CutCounter::consistent(cut)) {
    return "the ranks were at different points of the program (a message was under way, or they "
           "count steps "
           "differently)";
  }
  std::map<std::string, std::pair<std::vector<int>, std::optional<uint64_t>>>
      groups;  // id → ranks, digest
  for (const auto& [rank, where] : found) {
    for (const GroupSummary& group : where.second->groups) {
      const auto [at, added] = groups.try_emplace(group.id);
      auto& [ranks, digest] = at->second;
      if (added) {
        ranks = group.ranks;
      } else if (ranks != group.ranks) {
        return "members disagree about who shares group " + group.id;
      }
      if (group.digest == 0) {
        // Not recorded: a vault keeps the digests of its first groups only.
      } else if (!digest) {
        digest = group.digest;
      } else if (*digest != group.digest) {
        return "replicas of group " + group.id + " differed at that step (rank " +
               std::to_string(rank) +
               " against another member): silent data corruption or state that is not a replica";
      }
      auto& shards = plan.holders[group.id];
      shards.resize(ranks.size());
      for (const uint32_t shard : group.shards) {
        if (shard < shards.size()) {
          shards[shard].push_back(rank);
        }
      }
    }
  }
  for (const auto& [id, shards] : plan.holders) {
    for (size_t shard = 0; shard < shards.size(); ++shard) {
      if (shards[shard].empty()) {
        return "shard " + std::to_string(shard) + " of group " + id + " is not sealed anywhere";
      }
    }
  }
  for (const int rank : missing) {
    // A lost rank comes back if every group that a surviving member shares with it is whole; the
    // member is the donor.
    int donor = -1;
    for (const auto& [id, group] : groups) {
      const auto& ranks = group.first;
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
        continue;
      }
      for (const int member : ranks) {
        if (found.contains(member) && (donor < 0 || member < donor)) {
          donor = member;
        }
      }
    }
    if (donor < 0) {
      return "nothing of rank(s) " + listOf(missing) + " is sealed anywhere";
    }
    plan.donor[rank] = donor;
  }
  return std::nullopt;
}

}  // namespace

std::vector<SlotSummary> summarizeVerified(const VaultReader& reader,
                                           std::vector<std::string>& faults) {
  std::vector<SlotSummary> result;
  for (const SlotView& view : reader.slots()) {
    const std::string where =
        "rank " + std::to_string(reader.identity().rank) + " step " + std::to_string(view.step);
    try {
      const SnapshotTable table = reader.table(view);
      std::set<std::pair<int32_t, uint32_t>> bad;
      for (const ChunkFault& fault : reader.verify(view)) {
        faults.push_back(where + ": checksum of the bytes at payload offset " +
                         std::to_string(fault.payload_offset) + " does not match");
        for (const Piece& piece : table.pieces) {
          if (piece.payload_offset < fault.payload_offset + view.chunk_bytes &&
              fault.payload_offset < piece.payload_offset + (piece.end - piece.begin)) {
            bad.emplace(table.regions[piece.region].group, piece.shard);
          }
        }
      }
      if (std::any_of(bad.begin(), bad.end(), [](const auto& part) { return part.first < 0; })) {
        continue;  // a private part has no second source here
      }
      SlotSummary summary{view.index, view.step, view.incarnation, view.cut, {}};
      for (size_t g = 0; g < table.groups.size(); ++g) {
        std::vector<uint32_t> shards = table.shardsOf(static_cast<int32_t>(g));
        std::erase_if(shards, [&](uint32_t shard) {
          return bad.contains({static_cast<int32_t>(g), shard});
        });
        summary.groups.push_back({table.groups[g].id, table.groups[g].ranks, std::move(shards),
                                  g < view.group_digests.size() ? view.group_digests[g] : 0});
      }
      result.push_back(std::move(summary));
    } catch (const Corruption& error) {
      faults.push_back(where + ": " + error.what());
    }
  }
  return result;
}

std::string inventoryJson(const std::vector<VaultSummary>& vaults) {
  Json list = Json::array();
  for (const VaultSummary& vault : vaults) {
    Json slots = Json::array();
    for (const SlotSummary& slot : vault.slots) {
      Json groups = Json::array();
      for (const GroupSummary& group : slot.groups) {
        groups.push_back({group.id, group.ranks, group.shards, group.digest});
      }
      slots.push_back({slot.slot, slot.step, slot.incarnation, slot.cut, std::move(groups)});
    }
    list.push_back({{"rank", vault.rank}, {"node", vault.node}, {"slots", std::move(slots)}});
  }
  return list.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<VaultSummary> parseInventories(const std::vector<std::string>& json_of_nodes) {
  std::vector<VaultSummary> vaults;
  for (const std::string& text : json_of_nodes) {
    try {
      for (const Json& v : Json::parse(text)) {
        VaultSummary vault{integerOf<int>(v.at("rank")), integerOf<int>(v.at("node")), {}};
        for (const Json& s : v.at("slots")) {
          SlotSummary slot{integerOf<uint32_t>(s.at(0)),
                           integerOf<int64_t>(s.at(1)),
                           integerOf<uint64_t>(s.at(2)),
                           integerOf<uint64_t>(s.at(3)),
                           {}};
          for (const Json& g : s.at(4)) {
            slot.groups.push_back({g.at(0).get<std::string>(), integersOf<int>(g.at(1)),
                                   integersOf<uint32_t>(g.at(2)), integerOf<uint64_t>(g.at(3))});
          }
          vault.slots.push_back(std::move(slot));
        }
        vaults.push_back(std::move(vault));
      }
    } catch (const Json::exception& error) {
      throw Corruption(std::string("inventory of a node: ") + error.what());
    } catch (const InvalidArgument& error) {
      throw Corruption(std::string("inventory of a node: ") + error.what());
    }
  }
  return vaults;
}

Agreement agreeOnRestore(const std::vector<VaultSummary>& vaults, int world) {
  Agreement result;
  std::map<Key, Found> candidates;
  std::set<int> present;
  for (const VaultSummary& vault : vaults) {
    present.insert(vault.rank);
    for (const SlotSummary& slot : vault.slots) {
      if (vault.rank >= 0) {
        // Two nodes may show a vault of one rank (it moved): the lower node number is taken on
        // every rank alike.
        auto [at, added] =
            candidates[{slot.step, slot.incarnation}].try_emplace(vault.rank, &vault, &slot);
        if (!added && vault.node < at->second.first->node) {
          at->second = {&vault, &slot};
        }
      }
    }
  }
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    RestorePlan plan;
    plan.step = candidate->first.first;
    plan.incarnation = candidate->first.second;
    if (const auto reason = tryPlan(candidate->second, present, world, plan)) {
      result.rejected.push_back("step " + std::to_string(plan.step) + ": " + *reason);
    } else {
      result.plan = std::move(plan);
      return result;
    }
  }
  return result;
}

}  // namespace reft
