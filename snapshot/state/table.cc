#include "snapshot/state/table.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/base/json_integer.h"
#include "snapshot/state/align.h"

namespace reft {

namespace {

using Json = nlohmann::json;

constexpr uint64_t kPieceAlign = 64;
constexpr size_t kMaxItems = 10'000'000;
constexpr size_t kLongestTable = size_t{1} << 30;

[[noreturn]] void corrupt(const std::string& what) {
  throw Corruption("snapshot table: " + what);
}

}  // namespace

std::vector<ShardRange> shardRanges(const std::vector<RegionInfo>& regions, int32_t group,
                                    uint32_t index, uint32_t members) {
  uint64_t total = 0;
  for (const RegionInfo& region : regions) {
    total += region.group == group ? region.bytes : 0;
  }
  // A cut is the ideal byte rounded down to a row of the region that it falls into; the same rule
  // on every member.
  const auto cut = [&](uint64_t ideal, uint64_t start, const RegionInfo& region) -> uint64_t {
    if (ideal <= start) {
      return 0;
    }
    if (ideal >= start + region.bytes) {
      return region.bytes;
    }
    const uint64_t row = region.row_bytes == 0 ? region.bytes : region.row_bytes;
    return (ideal - start) / row * row;
  };
  // 128-bit product: total × index exceeds 64 bits for large jobs.
  const auto ideal = [&](uint32_t i) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(total) * i / members);
  };
  const uint64_t from = ideal(index);
  const uint64_t to = ideal(index + 1);
  std::vector<ShardRange> result;
  uint64_t start = 0;
  for (uint32_t i = 0; i < regions.size(); ++i) {
    const RegionInfo& region = regions[i];
    if (region.group != group) {
      continue;
    }
    const uint64_t begin = cut(from, start, region);
    const uint64_t end = index + 1 == members ? region.bytes : cut(to, start, region);
    if (begin < end) {
      result.push_back({i, begin, end});
    }
    start += region.bytes;
  }
  return result;
}

SnapshotTable buildTable(int rank, int world, std::vector<RegionInfo> regions,
                         std::vector<GroupInfo> groups, const std::string& protection,
                         const std::vector<std::vector<uint32_t>>& held, uint64_t chunk_bytes) {
  SnapshotTable table;
  table.rank = rank;
  table.world = world;
  table.protection = protection;
  table.chunk_bytes = chunk_bytes;
  table.regions = std::move(regions);
  table.groups = std::move(groups);
  if (chunk_bytes == 0 || chunk_bytes % kPieceAlign != 0) {
    throw InvalidArgument("chunk_bytes", std::to_string(chunk_bytes), "a positive multiple of 64");
  }
  if (!held.empty() && held.size() != table.groups.size()) {
    throw InvalidArgument("held", "of " + std::to_string(held.size()) + " groups",
                          "one list for each of " + std::to_string(table.groups.size()));
  }
  std::vector<Piece> pieces;
  for (uint32_t i = 0; i < table.regions.size(); ++i) {
    const RegionInfo& region = table.regions[i];
    if (region.group < -1 || region.group >= static_cast<int32_t>(table.groups.size())) {
      throw InvalidArgument("group of region " + region.name, std::to_string(region.group),
                            "-1 or an index of a group");
    }
    if (region.row_bytes > region.bytes) {
      throw InvalidArgument("row_bytes of region " + region.name, std::to_string(region.row_bytes),
                            "at most its " + std::to_string(region.bytes) + " bytes");
    }
    if (region.group < 0 && region.bytes > 0) {
      pieces.push_back({i, 0, 0, region.bytes, 0});
    }
  }
  for (uint32_t g = 0; g < table.groups.size(); ++g) {
    const std::vector<int>& ranks = table.groups[g].ranks;
    const auto self = std::find(ranks.begin(), ranks.end(), rank);
    if (self == ranks.end()) {
      throw InvalidArgument("group " + table.groups[g].id, "without rank " + std::to_string(rank),
                            "groups of the rank");
    }
    const auto members = static_cast<uint32_t>(ranks.size());
    const auto own = static_cast<uint32_t>(self - ranks.begin());
    for (const uint32_t shard : held.empty() ? std::vector<uint32_t>{own} : held[g]) {
      if (shard >= members) {
        throw InvalidArgument("shard " + std::to_string(shard),
                              "held of group " + table.groups[g].id,
                              "shards of its " + std::to_string(members) + " members");
      }
      for (const ShardRange& range :
           shardRanges(table.regions, static_cast<int32_t>(g), shard, members)) {
        pieces.push_back({range.region, shard, range.begin, range.end, 0});
      }
    }
  }
  const auto early = [&](const Piece& piece) { return table.regions[piece.region].early; };
  std::stable_partition(pieces.begin(), pieces.end(), early);
  uint64_t offset = 0;
  bool in_early = true;
  for (Piece& piece : pieces) {
    if (in_early && !early(piece)) {
      in_early = false;
      offset = alignUp(offset, chunk_bytes);
      table.early_bytes = offset;
    }
    piece.payload_offset = offset;
    offset = alignUp(offset + (piece.end - piece.begin), kPieceAlign);
  }
  if (in_early) {
    offset = alignUp(offset, chunk_bytes);
    table.early_bytes = offset;
  }
  table.payload_bytes = offset;
  table.pieces = std::move(pieces);
  return table;
}

std::vector<uint32_t> SnapshotTable::shardsOf(int32_t g) const {
  std::set<std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>> present;
  for (const Piece& piece : pieces) {
    if (regions[piece.region].group == g) {
      present.emplace(piece.shard, piece.region, piece.begin, piece.end);
    }
  }
  // Held = every range is there.
  std::vector<uint32_t> found;
  const auto members = static_cast<uint32_t>(groups[static_cast<size_t>(g)].ranks.size());
  for (uint32_t shard = 0; shard < members; ++shard) {
    const std::vector<ShardRange> ranges = shardRanges(regions, g, shard, members);
    if (!ranges.empty() && std::all_of(ranges.begin(), ranges.end(), [&](const ShardRange& range) {
          return present.contains({shard, range.region, range.begin, range.end});
        })) {
      found.push_back(shard);
    }
  }
  return found;
}

std::vector<uint32_t> SnapshotTable::emptyShardsOf(int32_t g) const {
  std::vector<uint32_t> found;
  const auto members = static_cast<uint32_t>(groups[static_cast<size_t>(g)].ranks.size());
  for (uint32_t shard = 0; shard < members; ++shard) {
    if (shardRanges(regions, g, shard, members).empty()) {
      found.push_back(shard);
    }
  }
  return found;
}

std::string SnapshotTable::toJson() const {
  Json regions_json = Json::array();
  for (const RegionInfo& r : regions) {
    regions_json.push_back({r.name, r.dtype, r.shape, r.bytes, r.row_bytes, r.group, r.early,
                            r.strides, r.replaceable});
  }
  Json groups_json = Json::array();
  for (const GroupInfo& g : groups) {
    groups_json.push_back({g.id, g.ranks});
  }
  Json pieces_json = Json::array();
  for (const Piece& p : pieces) {
    pieces_json.push_back({p.region, p.shard, p.begin, p.end, p.payload_offset});
  }
  return Json{{"rank", rank},
              {"world", world},
              {"protection", protection},
              {"chunk_bytes", chunk_bytes},
              {"early_bytes", early_bytes},
              {"payload_bytes", payload_bytes},
              {"regions", std::move(regions_json)},
              {"groups", std::move(groups_json)},
              {"pieces", std::move(pieces_json)}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

SnapshotTable SnapshotTable::fromJson(std::string_view text) {
  SnapshotTable table;
  try {
    const Json json = parseJson(text, kLongestTable);
    if (!json.is_object()) {
      corrupt("not a JSON object");
    }
    table.rank = integerOf<int>(json.at("rank"));
    table.world = integerOf<int>(json.at("world"));
    table.protection = json.at("protection").get<std::string>();
    table.chunk_bytes = integerOf<uint64_t>(json.at("chunk_bytes"));
    table.early_bytes = integerOf<uint64_t>(json.at("early_bytes"));
    table.payload_bytes = integerOf<uint64_t>(json.at("payload_bytes"));
    for (const Json& g : json.at("groups")) {
      table.groups.push_back({g.at(0).get<std::string>(), integersOf<int>(g.at(1))});
    }
    for (const Json& r : json.at("regions")) {
      RegionInfo info;
      info.name = r.at(0).get<std::string>();
      info.dtype = r.at(1).get<std::string>();
      info.shape = integersOf<int64_t>(r.at(2));
      info.bytes = integerOf<uint64_t>(r.at(3));
      info.row_bytes = integerOf<uint64_t>(r.at(4));
      info.group = integerOf<int32_t>(r.at(5));
      info.early = r.at(6).get<bool>();
      info.strides = integersOf<int64_t>(r.at(7));
      info.replaceable = r.at(8).get<bool>();
      table.regions.push_back(std::move(info));
    }
    for (const Json& p : json.at("pieces")) {
      table.pieces.push_back({integerOf<uint32_t>(p.at(0)), integerOf<uint32_t>(p.at(1)),
                              integerOf<uint64_t>(p.at(2)), integerOf<uint64_t>(p.at(3)),
                              integerOf<uint64_t>(p.at(4))});
    }
  } catch (const Json::exception& error) {
    corrupt(error.what());
  } catch (const InvalidArgument& error) {
    corrupt(error.what());
  }
  if (table.world < 1 || table.rank < 0 || table.rank >= table.world) {
    corrupt("rank " + std::to_string(table.rank) + " of " + std::to_string(table.world));
  }
  if (table.chunk_bytes == 0 || table.chunk_bytes % kPieceAlign != 0 ||
      table.regions.size() > kMaxItems || table.pieces.size() > kMaxItems ||
      table.early_bytes > table.payload_bytes || table.early_bytes % table.chunk_bytes != 0) {
    corrupt("sizes");
  }
  for (const GroupInfo& group : table.groups) {
    if (group.ranks.empty() || !std::is_sorted(group.ranks.begin(), group.ranks.end()) ||
        group.ranks.front() < 0 || group.ranks.back() >= table.world ||
        std::adjacent_find(group.ranks.begin(), group.ranks.end()) != group.ranks.end() ||
        !std::binary_search(group.ranks.begin(), group.ranks.end(), table.rank)) {
      corrupt("ranks of group " + group.id);
    }
  }
  uint64_t state_bytes = 0;
  for (const RegionInfo& region : table.regions) {
    if (__builtin_add_overflow(state_bytes, region.bytes, &state_bytes)) {
      corrupt("bytes of region " + region.name);
    }
    if (region.group < -1 || region.group >= static_cast<int32_t>(table.groups.size())) {
      corrupt("group of region " + region.name);
    }
    if (region.row_bytes > region.bytes) {
      corrupt("row of region " + region.name);
    }
    if (!region.strides.empty() && region.strides.size() != region.shape.size()) {
      corrupt("strides of region " + region.name);
    }
  }
  uint64_t end = 0;
  const auto members = [&](const Piece& piece) -> size_t {
    const int32_t group = table.regions[piece.region].group;
    return group < 0 ? 1 : table.groups[static_cast<size_t>(group)].ranks.size();
  };
  for (const Piece& piece : table.pieces) {
    if (piece.region >= table.regions.size() || piece.shard >= members(piece) ||
        piece.begin > piece.end || piece.end > table.regions[piece.region].bytes ||
        piece.payload_offset < end || piece.payload_offset > table.payload_bytes ||
        piece.end - piece.begin > table.payload_bytes - piece.payload_offset) {
      corrupt("piece of region " + std::to_string(piece.region));
    }
    end = piece.payload_offset + (piece.end - piece.begin);
  }
  return table;
}

}  // namespace reft
