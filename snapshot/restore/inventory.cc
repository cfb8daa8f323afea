#include "snapshot/restore/inventory.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <unordered_map>

#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/base/json_integer.h"
#include "snapshot/state/agreement.h"
#include "snapshot/vault/reader.h"

namespace reft {

namespace {

using Json = nlohmann::json;

constexpr int kMaxNodes = 1 << 20;
constexpr size_t kLongestText = size_t{1} << 30;  // of a whole job
constexpr size_t kMostMembers = size_t{1} << 24;  // of all groups of a text together

// Ranks in ascending order as runs [first, last, step].
Json runsOf(const std::vector<int>& ranks) {
  Json runs = Json::array();
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    const int step = end < ranks.size() ? ranks[end] - ranks[i] : 1;
    while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) {
      ++end;
    }
    if (end - i == 2 && step > 1) {  // the second may begin a longer one
      --end;
    }
    runs.push_back({ranks[i], ranks[end - 1], end - i > 1 ? step : 1});
    i = end;
  }
  return runs;
}

// Throws Corruption unless the ranks ascend and are at most `most`.
std::vector<int> ranksOf(const Json& runs, size_t most) {
  std::vector<int> ranks;
  for (const Json& run : runs) {
    const int first = integerOf<int>(run.at(0)), last = integerOf<int>(run.at(1)),
              step = integerOf<int>(run.at(2));
    if (first < 0 || first > last || step < 1 || (last - first) % step != 0 ||
        (!ranks.empty() && first <= ranks.back())) {
      throw Corruption("inventory of a node: ranks " + run.dump());
    }
    if (static_cast<size_t>((last - first) / step) >= most - ranks.size()) {
      throw Corruption("inventory of a node: groups of too many ranks");
    }
    for (int rank = first; rank <= last; rank += step) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// Different groups, in the order of their first appearance.
class GroupSet {
 public:
  // Returns the index of the group that is equal.
  size_t add(const std::shared_ptr<const GroupInfo>& group) {
    for (auto [at, end] = by_id_.equal_range(group->id); at != end; ++at) {
      if (groups_[at->second]->ranks == group->ranks) {
        return at->second;
      }
    }
    groups_.push_back(group);
    by_id_.emplace(group->id, groups_.size() - 1);
    return groups_.size() - 1;
  }
  const std::vector<std::shared_ptr<const GroupInfo>>& groups() const { return groups_; }

 private:
  std::vector<std::shared_ptr<const GroupInfo>> groups_;
  std::multimap<std::string_view, size_t> by_id_;
};

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
      SlotSummary summary{view.index, view.step, view.incarnation, view.cut, {}, table.protection};
      const std::vector<uint64_t> layouts = groupLayouts(table);
      for (size_t g = 0; g < table.groups.size(); ++g) {
        std::vector<uint32_t> shards = table.shardsOf(static_cast<int32_t>(g));
        std::erase_if(shards, [&](uint32_t shard) {
          return bad.contains({static_cast<int32_t>(g), shard});
        });
        summary.groups.push_back(
            {std::make_shared<const GroupInfo>(table.groups[g]), std::move(shards),
             g < view.group_digests.size() ? view.group_digests[g] : 0, layouts[g]});
      }
      result.push_back(std::move(summary));
    } catch (const Corruption& error) {
      faults.push_back(where + ": " + error.what());
    }
  }
  return result;
}

std::string inventoryJson(const std::vector<VaultSummary>& vaults) {
  GroupSet set;
  std::unordered_map<const GroupInfo*, size_t> index_of;  // most vaults share the object
  Json list = Json::array();
  for (const VaultSummary& vault : vaults) {
    Json slots = Json::array();
    for (const SlotSummary& slot : vault.slots) {
      Json held = Json::array();
      for (const GroupSummary& group : slot.groups) {
        const auto [at, added] = index_of.try_emplace(group.info.get(), 0);
        if (added) {
          at->second = set.add(group.info);
        }
        held.push_back({at->second, group.shards, group.digest, group.layout});
      }
      slots.push_back(
          {slot.slot, slot.step, slot.incarnation, slot.cut, slot.protection, std::move(held)});
    }
    list.push_back({{"rank", vault.rank}, {"node", vault.node}, {"slots", std::move(slots)}});
  }
  Json groups = Json::array();  // [id, runs] of each group once
  for (const auto& group : set.groups()) {
    groups.push_back({group->id, runsOf(group->ranks)});
  }
  return Json{{"groups", std::move(groups)}, {"vaults", std::move(list)}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

std::vector<VaultSummary> parseInventories(const std::vector<std::string>& texts) {
  std::vector<VaultSummary> vaults;
  GroupSet set;  // of all texts
  for (const std::string& text : texts) {
    try {
      const Json json = parseJson(text, kLongestText);
      if (!json.is_object()) {
        throw Corruption("inventory of a node: not a JSON object");
      }
      std::vector<size_t> groups;  // indices in `set`
      size_t members = 0;
      for (const Json& g : json.at("groups")) {
        const auto group = std::make_shared<const GroupInfo>(
            GroupInfo{g.at(0).get<std::string>(), ranksOf(g.at(1), kMostMembers - members)});
        groups.push_back(set.add(group));
        members += group->ranks.size();
      }
      for (const Json& v : json.at("vaults")) {
        VaultSummary vault{integerOf<int>(v.at("rank")), integerOf<int>(v.at("node")), {}};
        if (vault.node < 0 || vault.node >= kMaxNodes) {
          throw Corruption("inventory of a node: node " + std::to_string(vault.node));
        }
        for (const Json& s : v.at("slots")) {
          SlotSummary slot;
          slot.slot = integerOf<uint32_t>(s.at(0));
          slot.step = integerOf<int64_t>(s.at(1));
          slot.incarnation = integerOf<uint64_t>(s.at(2));
          slot.cut = integerOf<uint64_t>(s.at(3));
          slot.protection = s.at(4).get<std::string>();
          for (const Json& g : s.at(5)) {
            const auto group = integerOf<uint32_t>(g.at(0));
            if (group >= groups.size()) {
              throw Corruption("inventory of a node: group " + std::to_string(group) + " of " +
                               std::to_string(groups.size()));
            }
            std::vector<uint32_t> shards = integersOf<uint32_t>(g.at(1));
            std::sort(shards.begin(), shards.end());
            slot.groups.push_back({set.groups()[groups[group]], std::move(shards),
                                   integerOf<uint64_t>(g.at(2)), integerOf<uint64_t>(g.at(3))});
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

}  // namespace reft
