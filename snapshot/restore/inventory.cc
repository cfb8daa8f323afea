#include "snapshot/restore/inventory.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/base/json_integer.h"
#include "snapshot/state/agreement.h"
#include "snapshot/state/parity_cells.h"
#include "snapshot/vault/reader.h"

namespace reft {

namespace {

using Json = nlohmann::json;

constexpr int kMaxNodes = 1 << 20;
constexpr int kMaxRanks = 1 << 20;
constexpr size_t kLongestText = size_t{1} << 30;  // of a whole job
constexpr size_t kMostMembers = size_t{1} << 24;  // ranks and empty shards of all groups

// Numbers in ascending order as runs [first, last, step].
template <typename T>
Json runsOf(const std::vector<T>& numbers) {
  Json runs = Json::array();
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    const T step = end < numbers.size() ? numbers[end] - numbers[i] : 1;
    while (end < numbers.size() && numbers[end] - numbers[end - 1] == step) {
      ++end;
    }
    if (end - i == 2 && step > 1) {  // the second may begin a longer one
      --end;
    }
    runs.push_back({numbers[i], numbers[end - 1], end - i > 1 ? step : 1});
    i = end;
  }
  return runs;
}

// Throws Corruption unless the numbers ascend and are at most `most`, which it lowers by them.
template <typename T>
std::vector<T> numbersOf(const Json& runs, size_t& most) {
  if (!runs.is_array()) {
    throw Corruption("inventory of a node: runs " + runs.dump());
  }
  std::vector<T> numbers;
  for (const Json& run : runs) {
    if (!run.is_array() || run.size() != 3) {
      throw Corruption("inventory of a node: run " + run.dump());
    }
    const int first = integerOf<int>(run[0]), last = integerOf<int>(run[1]),
              step = integerOf<int>(run[2]);
    if (first < 0 || first > last || step < 1 || (last - first) % step != 0 ||
        (!numbers.empty() && static_cast<T>(first) <= numbers.back())) {
      throw Corruption("inventory of a node: run " + run.dump());
    }
    const size_t count = static_cast<size_t>((last - first) / step) + 1;
    if (count > most) {
      throw Corruption("inventory of a node: groups of too many ranks");
    }
    most -= count;
    for (size_t i = 0; i < count; ++i) {  // a sum past the last one might overflow
      numbers.push_back(static_cast<T>(first + static_cast<int>(i) * step));
    }
  }
  return numbers;
}

// Throws Corruption unless these are members of a group of so many, each once.
std::vector<uint32_t> setOf(const Json& json, size_t members) {
  std::vector<uint32_t> set = integersOf<uint32_t>(json);
  std::vector<uint32_t> sorted = set;
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && (sorted.size() > kMostInAParitySet || sorted.back() >= members ||
                          std::ranges::adjacent_find(sorted) != sorted.end())) {
    throw Corruption("inventory of a node: a parity set of a group of " + std::to_string(members));
  }
  return set;
}

std::vector<uint32_t> ownSet(const SnapshotTable& table, int32_t group) {
  const GroupInfo& info = table.groups[static_cast<size_t>(group)];
  const std::vector<uint32_t>* const set = paritySetOf(info, table.memberOf(group));
  return set == nullptr ? std::vector<uint32_t>() : *set;
}

// The first region that no other rank has, and for which no other rank's may stand in; "": none.
// `without`: names that do not count.
std::string onlyHere(const SnapshotTable& table, const std::set<std::string_view>& without) {
  for (const RegionInfo& region : table.regions) {
    if (region.group < 0 && region.bytes > 0 && !region.replaceable &&
        !without.contains(region.name)) {
      return region.name;
    }
  }
  return "";
}

// Different groups, in the order of their first appearance.
class GroupSet {
 public:
  // Returns the index of the group that is equal.
  size_t add(const std::shared_ptr<const SharedGroup>& group) {
    const auto [at, added] = index_of_.try_emplace(group, groups_.size());
    if (added) {
      groups_.push_back(group);
    }
    return at->second;
  }
  const std::vector<std::shared_ptr<const SharedGroup>>& groups() const { return groups_; }

 private:
  struct Less {
    bool operator()(const auto& a, const auto& b) const { return *a < *b; }
  };
  std::vector<std::shared_ptr<const SharedGroup>> groups_;
  std::map<std::shared_ptr<const SharedGroup>, size_t, Less> index_of_;
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
        for (const ParityPiece& piece : table.parities) {
          if (piece.payload_offset < fault.payload_offset + view.chunk_bytes &&
              fault.payload_offset < piece.payload_offset + (piece.end - piece.begin)) {
            const auto group = static_cast<int32_t>(piece.group);
            bad.emplace(group, table.parityPart(group));
          }
        }
      }
      if (std::any_of(bad.begin(), bad.end(), [](const auto& part) { return part.first < 0; })) {
        continue;  // a private part has no second source here
      }
      SlotSummary summary{view.index, view.step, view.incarnation, view.cut, {}, table.protection};
      summary.only_here = onlyHere(table, {});
      summary.indivisible = onlyHere(table, table.splitNames());
      summary.splits = digestOf(table.splits);
      const std::vector<uint64_t> layouts = groupLayouts(table);
      for (size_t g = 0; g < table.groups.size(); ++g) {
        const auto index = static_cast<int32_t>(g);
        std::vector<uint32_t> shards = table.shardsOf(index);
        if (table.holdsParityOf(index)) {
          shards.push_back(table.parityPart(index));
        }
        std::erase_if(shards, [&](uint32_t shard) { return bad.contains({index, shard}); });
        const GroupInfo& info = table.groups[g];
        summary.groups.push_back({std::make_shared<const SharedGroup>(
                                      SharedGroup{info.id, info.ranks, table.emptyShardsOf(index)}),
                                  std::move(shards),
                                  g < view.group_digests.size() ? view.group_digests[g] : 0,
                                  layouts[g], ownSet(table, index)});
      }
      result.push_back(std::move(summary));
    } catch (const Corruption& error) {
      faults.push_back(where + ": " + error.what());
    }
  }
  return result;
}

bool VaultSummary::wasThere(int64_t step, uint64_t incarnation) const {
  const bool has_slot = std::any_of(slots.begin(), slots.end(), [&](const SlotSummary& slot) {
    return slot.incarnation == incarnation;
  });
  if (is_copy && writer == kUnknown) {
    return false;  // it may not have had the step yet
  }
  const bool is_substitute = writer != kUnknown && (slots.empty() || resumed == step);
  return has_slot || writer == incarnation || !is_substitute;
}

std::string inventoryJson(const std::vector<VaultSummary>& vaults) {
  GroupSet set;
  std::unordered_map<const SharedGroup*, size_t> index_of;  // most vaults share the object
  Json list = Json::array();
  for (const VaultSummary& vault : vaults) {
    Json slots = Json::array();
    for (const SlotSummary& slot : vault.slots) {
      Json held = Json::array();
      for (const GroupSummary& group : slot.groups) {
        const auto [at, added] = index_of.try_emplace(group.shared.get(), 0);
        if (added) {
          at->second = set.add(group.shared);
        }
        held.push_back({at->second, group.shards, group.digest, group.layout, group.parity_set});
      }
      slots.push_back({slot.slot, slot.step, slot.incarnation, slot.cut, slot.protection,
                       std::move(held), slot.only_here, slot.indivisible, slot.splits});
    }
    list.push_back({{"rank", vault.rank},
                    {"node", vault.node},
                    {"writer", vault.writer},
                    {"resumed", vault.resumed},
                    {"copy", vault.is_copy},
                    {"world", vault.world},
                    {"since", vault.since},
                    {"slots", std::move(slots)}});
  }
  Json groups = Json::array();  // [id, ranks, empty shards] of each group once
  for (const auto& group : set.groups()) {
    groups.push_back({group->id, runsOf(group->ranks), runsOf(group->empty)});
  }
  return Json{{"groups", std::move(groups)}, {"vaults", std::move(list)}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

std::vector<VaultSummary> parseInventories(const std::vector<std::string>& texts) {
  std::vector<VaultSummary> vaults;
  GroupSet set;  // of all texts
  size_t most_different = kMostMembers;
  for (const std::string& text : texts) {
    try {
      const Json json = parseJson(text, kLongestText);
      if (!json.is_object()) {
        throw Corruption("inventory of a node: not a JSON object");
      }
      std::vector<std::shared_ptr<const SharedGroup>> groups;
      size_t most = kMostMembers;
      for (const Json& g : json.at("groups")) {
        const auto group = std::make_shared<const SharedGroup>(
            SharedGroup{g.at(0).get<std::string>(), numbersOf<int>(g.at(1), most),
                        numbersOf<uint32_t>(g.at(2), most)});
        const size_t known = set.groups().size();
        groups.push_back(set.groups()[set.add(group)]);
        if (set.groups().size() > known) {
          const size_t size = group->ranks.size() + group->empty.size();
          if (size > most_different) {
            throw Corruption("inventory of a node: groups of too many ranks");
          }
          most_different -= size;
        }
      }
      for (const Json& v : json.at("vaults")) {
        VaultSummary vault{integerOf<int>(v.at("rank")),
                           integerOf<int>(v.at("node")),
                           {},
                           integerOf<uint64_t>(v.at("writer")),
                           integerOf<int64_t>(v.at("resumed")),
                           v.at("copy").get<bool>(),
                           integerOf<int>(v.at("world")),
                           integerOf<uint64_t>(v.at("since"))};
        if (vault.world < 0 || vault.world > kMaxRanks ||
            (vault.world > 0 && vault.rank >= vault.world)) {
          throw Corruption("inventory of a node: rank " + std::to_string(vault.rank) + " of " +
                           std::to_string(vault.world));
        }
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
          slot.only_here = s.at(6).get<std::string>();
          slot.indivisible = s.at(7).get<std::string>();
          slot.splits = integerOf<uint64_t>(s.at(8));
          for (const Json& g : s.at(5)) {
            const auto group = integerOf<uint32_t>(g.at(0));
            if (group >= groups.size()) {
              throw Corruption("inventory of a node: group " + std::to_string(group) + " of " +
                               std::to_string(groups.size()));
            }
            std::vector<uint32_t> shards = integersOf<uint32_t>(g.at(1));
            std::sort(shards.begin(), shards.end());
            slot.groups.push_back({groups[group], std::move(shards), integerOf<uint64_t>(g.at(2)),
                                   integerOf<uint64_t>(g.at(3)),
                                   setOf(g.at(4), groups[group]->ranks.size())});
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
