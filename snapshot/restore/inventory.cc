#include "snapshot/restore/inventory.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

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
        summary.groups.push_back({table.groups[g].id, table.groups[g].ranks, std::move(shards),
                                  g < view.group_digests.size() ? view.group_digests[g] : 0,
                                  layouts[g]});
      }
      result.push_back(std::move(summary));
    } catch (const Corruption& error) {
      faults.push_back(where + ": " + error.what());
    }
  }
  return result;
}

std::string inventoryJson(const std::vector<VaultSummary>& vaults) {
  Json groups = Json::array();  // [id, ranks] of each group once
  std::map<std::pair<std::string, std::vector<int>>, size_t> index_of;
  Json list = Json::array();
  for (const VaultSummary& vault : vaults) {
    Json slots = Json::array();
    for (const SlotSummary& slot : vault.slots) {
      Json held = Json::array();
      for (const GroupSummary& group : slot.groups) {
        const auto [at, added] = index_of.try_emplace({group.id, group.ranks}, groups.size());
        if (added) {
          groups.push_back({group.id, group.ranks});
        }
        held.push_back({at->second, group.shards, group.digest, group.layout});
      }
      slots.push_back(
          {slot.slot, slot.step, slot.incarnation, slot.cut, slot.protection, std::move(held)});
    }
    list.push_back({{"rank", vault.rank}, {"node", vault.node}, {"slots", std::move(slots)}});
  }
  return Json{{"groups", std::move(groups)}, {"vaults", std::move(list)}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

std::vector<VaultSummary> parseInventories(const std::vector<std::string>& texts) {
  std::vector<VaultSummary> vaults;
  for (const std::string& text : texts) {
    try {
      const Json json = parseJson(text, kLongestText);
      if (!json.is_object()) {
        throw Corruption("inventory of a node: not a JSON object");
      }
      std::vector<std::pair<std::string, std::vector<int>>> groups;
      for (const Json& g : json.at("groups")) {
        groups.emplace_back(g.at(0).get<std::string>(), integersOf<int>(g.at(1)));
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
            slot.groups.push_back({groups[group].first, groups[group].second, std::move(shards),
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
