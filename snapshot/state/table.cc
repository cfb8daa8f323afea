#include "snapshot/state/table.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/base/json_integer.h"
#include "snapshot/state/align.h"
#include "snapshot/state/parity_cells.h"

namespace reft {

namespace {

using Json = nlohmann::json;

constexpr uint64_t kPieceAlign = 64;
constexpr size_t kMaxItems = 10'000'000;
constexpr size_t kLongestTable = size_t{1} << 30;

[[noreturn]] void corrupt(const std::string& what) {
  throw Corruption("snapshot table: " + what);
}

// The parity of a group as runs of bytes, with whether they cover early regions.
struct ParityRun {
  ParityPiece piece;
  bool early = false;
};

std::vector<ParityRun> parityRuns(const SnapshotTable& table, uint32_t group, uint32_t own) {
  const ParityCells cells(table, static_cast<int32_t>(group), own);
  std::vector<std::pair<uint64_t, uint64_t>> early;
  cells.eachUnder(own, 0, cells.bytes(), [&](const std::vector<ShardRange>& ranges) {
    uint64_t at = 0;
    for (const ShardRange& range : ranges) {
      const uint64_t end = at + (range.end - range.begin);
      if (table.regions[range.region].early) {
        early.emplace_back(at / kPieceAlign * kPieceAlign, alignUp(end, kPieceAlign));
      }
      at = end;
    }
  });
  std::sort(early.begin(), early.end());
  std::vector<ParityRun> runs;
  const auto add = [&](uint64_t begin, uint64_t end, bool is_early) {
    if (begin < end) {
      runs.push_back({{group, begin, end, 0}, is_early});
    }
  };
  uint64_t done = 0;
  for (const auto& [begin, end] : early) {
    add(done, begin, false);
    if (begin <= done && !runs.empty() && runs.back().early) {
      runs.back().piece.end = std::max(runs.back().piece.end, end);
    } else {
      add(std::max(begin, done), end, true);
    }
    done = std::max(done, end);
  }
  add(done, cells.bytes(), false);
  return runs;
}

// What is wrong with the tensors that all ranks have in parts, as a rank's regions have its own; ""
// if nothing is.
std::string splitProblem(const SnapshotTable& table) {
  std::map<std::string_view, const RegionInfo*> by_name;
  for (const RegionInfo& region : table.regions) {
    by_name.emplace(region.name, &region);
  }
  std::set<std::string_view> seen;
  for (const SplitTensor& split : table.splits) {
    uint64_t whole = 0;
    const bool has_rows =
        !split.shape.empty() && split.shape[0] >= 0 && split.row_bytes > 0 &&
        !__builtin_mul_overflow(static_cast<uint64_t>(split.shape[0]), split.row_bytes, &whole);
    if (!has_rows || !seen.insert(split.name).second) {
      return split.name;
    }
    const uint64_t bytes = split.bytesOf(table.world, table.rank);
    const auto at = by_name.find(split.name);
    if ((at != by_name.end()) != (bytes > 0)) {
      return split.name;
    }
    if (at == by_name.end()) {
      continue;
    }
    const RegionInfo& own = *at->second;
    if (own.group >= 0 || own.dtype != split.dtype || own.bytes != bytes || !own.strides.empty() ||
        own.shape != split.shapeOf(table.world, table.rank)) {
      return split.name;
    }
  }
  return "";
}

// Lays pieces out one behind the other from `offset` on; returns where they end.
template <typename Pieces>
uint64_t layOut(Pieces& pieces, uint64_t offset) {
  for (auto* piece : pieces) {
    piece->payload_offset = offset;
    offset = alignUp(offset + (piece->end - piece->begin), kPieceAlign);
  }
  return offset;
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
                         const std::vector<std::vector<uint32_t>>& held, uint64_t chunk_bytes,
                         std::vector<SplitTensor> splits) {
  SnapshotTable table;
  table.rank = rank;
  table.world = world;
  table.protection = protection;
  table.chunk_bytes = chunk_bytes;
  table.regions = std::move(regions);
  table.groups = std::move(groups);
  table.splits = std::move(splits);
  if (world < 1 || rank < 0 || rank >= world) {
    throw InvalidArgument("rank", std::to_string(rank), "0.." + std::to_string(world - 1));
  }
  if (const std::string name = splitProblem(table); !name.empty()) {
    throw InvalidArgument("split tensor", name,
                          "tensors of which a rank's region has the rows that are its own");
  }
  if (chunk_bytes == 0 || chunk_bytes % kPieceAlign != 0) {
    throw InvalidArgument("chunk_bytes", std::to_string(chunk_bytes), "a positive multiple of 64");
  }
  if (!held.empty() && held.size() != table.groups.size()) {
    throw InvalidArgument("held", "of " + std::to_string(held.size()) + " groups",
                          "one list for each of " + std::to_string(table.groups.size()));
  }
  std::vector<Piece> pieces;
  std::vector<ParityRun> parities;
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
      if (shard == members + own && paritySetOf(table.groups[g], own) != nullptr) {
        std::ranges::move(parityRuns(table, g, own), std::back_inserter(parities));
        continue;
      }
      if (shard >= members) {
        throw InvalidArgument("shard " + std::to_string(shard),
                              "held of group " + table.groups[g].id,
                              "shards of its " + std::to_string(members) +
                                  " members, and the parity of a rank that is in a set");
      }
      for (const ShardRange& range :
           shardRanges(table.regions, static_cast<int32_t>(g), shard, members)) {
        pieces.push_back({range.region, shard, range.begin, range.end, 0});
      }
    }
  }
  // Early pieces, early parities, the other pieces, the other parities. A chunk holds pieces or
  // parities, and is early or not.
  for (const bool early : {true, false}) {
    std::vector<Piece*> of_regions;
    for (Piece& piece : pieces) {
      if (table.regions[piece.region].early == early) {
        of_regions.push_back(&piece);
      }
    }
    table.payload_bytes = layOut(of_regions, table.payload_bytes);
    std::vector<ParityPiece*> of_sets;
    for (ParityRun& run : parities) {
      if (run.early == early) {
        of_sets.push_back(&run.piece);
      }
    }
    if (!of_sets.empty()) {
      table.payload_bytes = layOut(of_sets, alignUp(table.payload_bytes, chunk_bytes));
    }
    if (early) {
      table.payload_bytes = alignUp(table.payload_bytes, chunk_bytes);
      table.early_bytes = table.payload_bytes;
    }
  }
  for (const ParityRun& run : parities) {
    table.parities.push_back(run.piece);
  }
  const auto by_offset = [](const auto& a, const auto& b) {
    return a.payload_offset < b.payload_offset;
  };
  std::ranges::sort(pieces, by_offset);
  std::ranges::sort(table.parities, by_offset);
  table.pieces = std::move(pieces);
  return table;
}

uint32_t SnapshotTable::memberOf(int32_t g) const {
  const std::vector<int>& ranks = groups[static_cast<size_t>(g)].ranks;
  return static_cast<uint32_t>(std::ranges::lower_bound(ranks, rank) - ranks.begin());
}

uint32_t SnapshotTable::parityPart(int32_t g) const {
  return static_cast<uint32_t>(groups[static_cast<size_t>(g)].ranks.size()) + memberOf(g);
}

std::set<std::string_view> SnapshotTable::splitNames() const {
  std::set<std::string_view> names;
  for (const SplitTensor& split : splits) {
    names.insert(split.name);
  }
  return names;
}

bool SnapshotTable::holdsParityOf(int32_t g) const {
  std::vector<std::pair<uint64_t, uint64_t>> held;
  for (const ParityPiece& piece : parities) {
    if (piece.group == static_cast<uint32_t>(g)) {
      held.emplace_back(piece.begin, piece.end);
    }
  }
  if (held.empty() || paritySetOf(groups[static_cast<size_t>(g)], memberOf(g)) == nullptr) {
    return false;
  }
  std::ranges::sort(held);
  uint64_t end = 0;
  for (const auto& [begin, to] : held) {
    if (begin != end) {
      return false;
    }
    end = to;
  }
  return end == ParityCells(*this, g, memberOf(g)).bytes();
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
    groups_json.push_back({g.id, g.ranks, g.sets});
  }
  Json splits_json = Json::array();
  for (const SplitTensor& s : splits) {
    splits_json.push_back({s.name, s.dtype, s.shape, s.row_bytes});
  }
  Json parities_json = Json::array();
  for (const ParityPiece& p : parities) {
    parities_json.push_back({p.group, p.begin, p.end, p.payload_offset});
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
              {"splits", std::move(splits_json)},
              {"pieces", std::move(pieces_json)},
              {"parities", std::move(parities_json)}}
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
      GroupInfo group{g.at(0).get<std::string>(), integersOf<int>(g.at(1))};
      for (const Json& set : g.at(2)) {
        group.sets.push_back(integersOf<uint32_t>(set));
      }
      table.groups.push_back(std::move(group));
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
    for (const Json& s : json.at("splits")) {
      table.splits.push_back({s.at(0).get<std::string>(), s.at(1).get<std::string>(),
                              integersOf<int64_t>(s.at(2)), integerOf<uint64_t>(s.at(3))});
    }
    for (const Json& p : json.at("pieces")) {
      table.pieces.push_back({integerOf<uint32_t>(p.at(0)), integerOf<uint32_t>(p.at(1)),
                              integerOf<uint64_t>(p.at(2)), integerOf<uint64_t>(p.at(3)),
                              integerOf<uint64_t>(p.at(4))});
    }
    for (const Json& p : json.at("parities")) {
      table.parities.push_back({integerOf<uint32_t>(p.at(0)), integerOf<uint64_t>(p.at(1)),
                                integerOf<uint64_t>(p.at(2)), integerOf<uint64_t>(p.at(3))});
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
      table.parities.size() > kMaxItems || table.splits.size() > kMaxItems ||
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
    std::vector<bool> seen(group.ranks.size());
    for (const std::vector<uint32_t>& set : group.sets) {
      for (const uint32_t member : set) {
        if (set.size() > kMostInAParitySet || member >= seen.size() || seen[member]) {
          corrupt("parity sets of group " + group.id);
        }
        seen[member] = true;
      }
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
  if (const std::string name = splitProblem(table); !name.empty()) {
    corrupt("rows of tensor " + name);
  }
  // Both kinds of pieces lie in the payload, in order, and none overlaps another.
  const auto lies_in = [&](const auto& piece, uint64_t end) {
    return piece.begin <= piece.end && piece.payload_offset >= end &&
           piece.payload_offset <= table.payload_bytes &&
           piece.end - piece.begin <= table.payload_bytes - piece.payload_offset;
  };
  const auto members = [&](const Piece& piece) -> size_t {
    const int32_t group = table.regions[piece.region].group;
    return group < 0 ? 1 : table.groups[static_cast<size_t>(group)].ranks.size();
  };
  std::vector<const std::vector<uint32_t>*> sets;  // the rank's own, of each group
  for (size_t g = 0; g < table.groups.size(); ++g) {
    sets.push_back(paritySetOf(table.groups[g], table.memberOf(static_cast<int32_t>(g))));
  }
  uint64_t end = 0;
  auto parity = table.parities.begin();
  const auto takeParities = [&](auto more) {
    for (; parity != table.parities.end() && more(*parity); ++parity) {
      const bool has_set = parity->group < table.groups.size() && sets[parity->group] != nullptr;
      if (!has_set || !lies_in(*parity, end)) {
        corrupt("parity of group " + std::to_string(parity->group));
      }
      end = parity->payload_offset + (parity->end - parity->begin);
    }
  };
  for (const Piece& piece : table.pieces) {
    takeParities([&](const ParityPiece& one) { return one.payload_offset < piece.payload_offset; });
    if (piece.region >= table.regions.size() || piece.shard >= members(piece) ||
        piece.end > table.regions[piece.region].bytes || !lies_in(piece, end)) {
      corrupt("piece of region " + std::to_string(piece.region));
    }
    end = piece.payload_offset + (piece.end - piece.begin);
  }
  takeParities([](const ParityPiece&) { return true; });
  return table;
}

}  // namespace reft
