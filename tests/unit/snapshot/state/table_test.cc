#include "snapshot/state/table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "intercept/base/error.h"

namespace reft {
namespace table_test {

using Json = nlohmann::json;
constexpr uint64_t kChunk = 4096;

GroupInfo groupOf(int members, const std::string& id = "g") {
  GroupInfo group{id, {}};
  for (int rank = 0; rank < members; ++rank) {
    group.ranks.push_back(rank);
  }
  return group;
}

RegionInfo region(const std::string& name, uint64_t rows, uint64_t row_bytes, int32_t group,
                  bool early = false) {
  const uint64_t bytes = rows * row_bytes;
  return {name,
          "uint8",
          {static_cast<int64_t>(rows), static_cast<int64_t>(row_bytes)},
          bytes,
          std::min(row_bytes, bytes),
          group,
          early};
}

std::vector<RegionInfo> randomRegions(std::mt19937_64& random, int32_t groups) {
  const auto below = [&](uint64_t n) { return random() % n; };
  std::vector<RegionInfo> regions;
  const uint64_t count = below(20);
  for (uint64_t i = 0; i < count; ++i) {
    const auto group = static_cast<int32_t>(below(static_cast<uint64_t>(groups) + 1)) - 1;
    RegionInfo info =
        region("r" + std::to_string(i), below(40), 1 + below(700), group, below(4) == 0);
    if (below(5) == 0) {
      info.row_bytes = info.bytes;  // not to be cut
      info.strides = {1, info.shape[0]};
    }
    regions.push_back(info);
  }
  return regions;
}

uint64_t groupBytes(const std::vector<RegionInfo>& regions, int32_t group) {
  uint64_t bytes = 0;
  for (const RegionInfo& r : regions) {
    bytes += r.group == group ? r.bytes : 0;
  }
  return bytes;
}

TEST(ShardRanges, PartitionEveryRegionExactlyAndCutOnRows) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 3000; ++round) {
    const auto regions = randomRegions(random, 2);
    const uint32_t members = 1 + random() % 9;
    std::vector<uint64_t> covered(regions.size(), 0);
    for (uint32_t shard = 0; shard < members; ++shard) {
      for (const ShardRange& range : shardRanges(regions, 0, shard, members)) {
        const RegionInfo& r = regions[range.region];
        ASSERT_EQ(r.group, 0);
        ASSERT_LT(range.begin, range.end);
        ASSERT_EQ(range.begin, covered[range.region]) << "gap or overlap in round " << round;
        ASSERT_GT(r.row_bytes, 0u);
        ASSERT_TRUE(range.begin % r.row_bytes == 0) << "cut inside a row";
        ASSERT_TRUE(range.end % r.row_bytes == 0) << "cut inside a row";
        covered[range.region] = range.end;
      }
    }
    for (size_t i = 0; i < regions.size(); ++i) {
      ASSERT_EQ(covered[i], regions[i].group == 0 ? regions[i].bytes : 0) << "round " << round;
    }
  }
}

TEST(ShardRanges, DifferByLessThanTheRowsAtTheirTwoCuts) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    const auto regions = randomRegions(random, 1);
    const uint32_t members = 1 + random() % 9;
    const uint64_t total = groupBytes(regions, 0);
    uint64_t largest_row = 0;
    for (const RegionInfo& r : regions) {
      largest_row = r.group == 0 ? std::max(largest_row, r.row_bytes) : largest_row;
    }
    uint64_t sum = 0;
    for (uint32_t shard = 0; shard < members; ++shard) {
      uint64_t bytes = 0;
      for (const ShardRange& range : shardRanges(regions, 0, shard, members)) {
        bytes += range.end - range.begin;
      }
      sum += bytes;
      const double ideal = static_cast<double>(total) / members;
      ASSERT_LE(std::abs(static_cast<double>(bytes) - ideal), static_cast<double>(largest_row) + 1);
    }
    ASSERT_EQ(sum, total);
  }
}

TEST(ShardRanges, HoldForTerabytesTimesThousandsOfMembers) {
  const std::vector<RegionInfo> regions = {region("huge", uint64_t{1} << 33, 4096, 0)};
  uint64_t covered = 0;
  for (uint32_t shard = 0; shard < 10'000; ++shard) {
    for (const ShardRange& range : shardRanges(regions, 0, shard, 10'000)) {
      ASSERT_EQ(range.begin, covered);
      covered = range.end;
    }
  }
  EXPECT_EQ(covered, regions[0].bytes);
}

TEST(ShardRanges, OfARegionThatMustNotBeCutGoToOneMember) {
  RegionInfo whole = region("w", 10, 10, 0);
  whole.row_bytes = whole.bytes;
  int holders = 0;
  for (uint32_t shard = 0; shard < 4; ++shard) {
    holders += static_cast<int>(shardRanges({whole}, 0, shard, 4).size());
  }
  EXPECT_EQ(holders, 1);
}

// What a rank holds of each region, without payload offsets.
std::vector<ShardRange> held(const SnapshotTable& table, int32_t group, uint32_t shard) {
  std::vector<ShardRange> result;
  for (const Piece& p : table.pieces) {
    if (table.regions[p.region].group == group && p.shard == shard) {
      result.push_back({p.region, p.begin, p.end});
    }
  }
  std::sort(result.begin(), result.end(),
            [](const auto& a, const auto& b) { return a.region < b.region; });
  return result;
}

// Shards of a member and of those after it.
std::vector<uint32_t> successive(int member, int members, uint32_t copies) {
  std::vector<uint32_t> shards;
  for (uint32_t k = 0; k <= copies && k < static_cast<uint32_t>(members); ++k) {
    shards.push_back((static_cast<uint32_t>(member) + k) % static_cast<uint32_t>(members));
  }
  return shards;
}

TEST(BuildTable, HoldsTheShardsItIsAskedFor) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    const auto regions = randomRegions(random, 2);
    const int members = 1 + static_cast<int>(random() % 5);
    const uint32_t copies = random() % 3;
    for (int rank = 0; rank < members; ++rank) {
      const std::vector<uint32_t> shards = successive(rank, members, copies);
      const SnapshotTable table =
          buildTable(rank, members, regions, {groupOf(members, "a"), groupOf(members, "b")}, "arc",
                     {shards, shards}, kChunk);
      for (int32_t group = 0; group < 2; ++group) {
        for (uint32_t shard = 0; shard < static_cast<uint32_t>(members); ++shard) {
          const uint32_t distance =
              (shard + static_cast<uint32_t>(members - rank)) % static_cast<uint32_t>(members);
          const auto expected = distance <= copies ? shardRanges(regions, group, shard,
                                                                 static_cast<uint32_t>(members))
                                                   : std::vector<ShardRange>{};
          const auto found = held(table, group, shard);
          ASSERT_EQ(found.size(), expected.size());
          for (size_t i = 0; i < found.size(); ++i) {
            ASSERT_EQ(found[i].region, expected[i].region);
            ASSERT_EQ(found[i].begin, expected[i].begin);
            ASSERT_EQ(found[i].end, expected[i].end);
          }
        }
      }
    }
  }
}

TEST(BuildTable, PutsEarlyPiecesFirstInWholeChunksAndNeverOverlaps) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 2000; ++round) {
    const SnapshotTable table =
        buildTable(1, 3, randomRegions(random, 1), {groupOf(3)}, "arc", {{1, 2}}, kChunk);
    ASSERT_EQ(table.early_bytes % kChunk, 0u);
    ASSERT_LE(table.early_bytes, table.payload_bytes);
    uint64_t end = 0;
    for (const Piece& piece : table.pieces) {
      ASSERT_GE(piece.payload_offset, end);
      ASSERT_EQ(piece.payload_offset % 64, 0u);
      end = piece.payload_offset + (piece.end - piece.begin);
      if (table.regions[piece.region].early) {
        ASSERT_LE(end, table.early_bytes);
      } else {
        ASSERT_GE(piece.payload_offset, table.early_bytes);
      }
    }
    ASSERT_LE(end, table.payload_bytes);
  }
}

TEST(BuildTable, TakesPrivateRegionsWhole) {
  const SnapshotTable table =
      buildTable(0, 2, {region("mine", 3, 5, -1)}, {groupOf(2)}, "none", {}, kChunk);
  ASSERT_EQ(table.pieces.size(), 1u);
  EXPECT_EQ(table.pieces[0].end - table.pieces[0].begin, 15u);
}

TEST(BuildTable, RejectsWhatAReaderWouldReject) {
  EXPECT_THROW(buildTable(0, 2, {}, {}, "none", {}, 100), InvalidArgument);
  EXPECT_THROW(buildTable(0, 2, {}, {}, "none", {}, 0), InvalidArgument);
  EXPECT_THROW(buildTable(0, 2, {region("r", 1, 1, 0)}, {}, "none", {}, kChunk), InvalidArgument);
  EXPECT_THROW(buildTable(0, 2, {region("r", 1, 1, -2)}, {}, "none", {}, kChunk), InvalidArgument);
  EXPECT_THROW(buildTable(5, 6, {}, {groupOf(3)}, "none", {}, kChunk), InvalidArgument);
  EXPECT_THROW(buildTable(0, 3, {}, {groupOf(3)}, "arc", {{0, 3}}, kChunk), InvalidArgument);
  EXPECT_THROW(buildTable(0, 3, {}, {groupOf(3)}, "arc", {{0}, {0}}, kChunk), InvalidArgument);
  RegionInfo wide = region("empty", 0, 1, -1);
  wide.row_bytes = 16;
  EXPECT_THROW(buildTable(0, 2, {wide}, {}, "none", {}, kChunk), InvalidArgument);
}

TEST(SnapshotTable, JsonRoundTripKeepsEverything) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    const SnapshotTable table =
        buildTable(2, 3, randomRegions(random, 1), {groupOf(3)}, "arc", {{2, 0}}, kChunk);
    const SnapshotTable again = SnapshotTable::fromJson(table.toJson());
    ASSERT_EQ(again.toJson(), table.toJson());
    ASSERT_EQ(again.shardsOf(0), table.shardsOf(0));
    ASSERT_EQ(again.emptyShardsOf(0), table.emptyShardsOf(0));
  }
}

TEST(SnapshotTable, NamesWithInvalidUtf8DoNotThrow) {
  const SnapshotTable table =
      buildTable(0, 1, {region("\xff\xfe", 1, 1, -1)}, {}, "none", {}, kChunk);
  EXPECT_NO_THROW(SnapshotTable::fromJson(table.toJson()));
}

TEST(SnapshotTable, AShardWithoutRowsIsEmptyAndHeldByNobody) {
  size_t held = 0;
  for (int rank = 0; rank < 4; ++rank) {
    RegionInfo whole = region("w", 1, 8, 0);
    const SnapshotTable table = buildTable(rank, 4, {whole}, {groupOf(4)}, "none", {}, kChunk);
    EXPECT_EQ(table.emptyShardsOf(0).size(), 3u) << "the one row lies in one shard";
    held += table.shardsOf(0).size();
  }
  EXPECT_EQ(held, 1u);
}

TEST(SnapshotTable, ShardsOfIgnoresAShardWithAMissingPiece) {
  SnapshotTable table =
      buildTable(0, 2, {region("a", 4, 64, 0), region("b", 4, 64, 0), region("c", 8, 64, 0)},
                 {groupOf(2)}, "none", {}, kChunk);
  ASSERT_EQ(table.shardsOf(0), std::vector<uint32_t>({0}));
  table.pieces.erase(table.pieces.begin());
  EXPECT_EQ(table.shardsOf(0), std::vector<uint32_t>());
}

class TableJson : public testing::Test {
 protected:
  Json json = Json::parse(buildTable(0, 2, {region("a", 8, 64, 0), region("b", 3, 5, -1, true)},
                                     {groupOf(2)}, "arc", {{0, 1}}, kChunk)
                              .toJson());
  void expectCorrupt(const std::string& what) {
    EXPECT_THROW(SnapshotTable::fromJson(json.dump()), Corruption) << what;
  }
};

TEST_F(TableJson, IsValidUnchanged) {
  EXPECT_NO_THROW(SnapshotTable::fromJson(json.dump()));
}

TEST_F(TableJson, RejectsTextThatIsNotATable) {
  for (const char* text : {"", "null", "[]", "{", "{}", "3", "{\"rank\":0}", "\xff"}) {
    EXPECT_THROW(SnapshotTable::fromJson(text), Corruption) << text;
  }
  EXPECT_THROW(SnapshotTable::fromJson(std::string(100'000, '[')), Corruption);
}

TEST_F(TableJson, RejectsEachMissingField) {
  for (const char* key : {"rank", "world", "protection", "chunk_bytes", "early_bytes",
                          "payload_bytes", "regions", "groups", "pieces", "parities"}) {
    ASSERT_TRUE(json.contains(key));
    Json less = json;
    less.erase(key);
    EXPECT_THROW(SnapshotTable::fromJson(less.dump()), Corruption) << key;
  }
}

TEST_F(TableJson, RejectsNumbersThatAreNoIntegersOfTheirType) {
  const Json whole = json;
  for (const Json& number :
       {Json(4e26), Json(-1.5), Json(0.5), Json("0"), Json(true), Json(uint64_t{1} << 63)}) {
    json = whole;
    json["rank"] = number;
    expectCorrupt("rank " + number.dump());
    json = whole;
    json["groups"][0][1][0] = number;
    expectCorrupt("rank of a group " + number.dump());
  }
  json = whole;
  json["pieces"][0][0] = (uint64_t{1} << 32) + 1;  // not region 1
  expectCorrupt("region");
  json = whole;
  json["chunk_bytes"] = -4096;
  expectCorrupt("chunk bytes");
}
TEST_F(TableJson, RejectsRankOutsideOfTheWorld) {
  json["rank"] = 2;
  expectCorrupt("rank");
}
TEST_F(TableJson, RejectsRegionOfAnUnknownGroup) {
  json["regions"][0][5] = 1;
  expectCorrupt("group");
}
TEST_F(TableJson, RejectsStridesOfAnotherNumberOfDimensions) {
  json["regions"][0][7] = {1, 8};
  EXPECT_NO_THROW(SnapshotTable::fromJson(json.dump()));
  json["regions"][0][7] = {1};
  expectCorrupt("strides");
}
TEST_F(TableJson, RejectsPieceBeyondItsRegion) {
  json["pieces"][1][3] = 513;
  expectCorrupt("piece end");
}
TEST_F(TableJson, RejectsPieceOfAnUnknownRegion) {
  json["pieces"][0][0] = 7;
  expectCorrupt("piece region");
}
TEST_F(TableJson, RejectsPiecesThatOverlapInThePayload) {
  json["pieces"][2][4] = json["pieces"][1][4];
  expectCorrupt("overlap");
}
TEST_F(TableJson, RejectsPieceBeyondThePayload) {
  json["pieces"][2][4] = uint64_t{1} << 63;
  expectCorrupt("payload");
}
TEST_F(TableJson, RejectsPieceOfAShardThatItsGroupDoesNotHave) {
  json["pieces"][1][1] = 2;
  expectCorrupt("shard");
}
TEST_F(TableJson, RejectsPrivatePieceWithAShard) {
  json["pieces"][0][1] = 1;
  expectCorrupt("private shard");
}
TEST_F(TableJson, RejectsRanksOutOfOrder) {
  json["groups"][0][1] = {1, 0};
  expectCorrupt("ranks");
}
TEST_F(TableJson, RejectsGroupWithoutTheRank) {
  json["rank"] = 1;
  json["groups"][0][1] = {0};
  expectCorrupt("group without rank");
}
TEST_F(TableJson, RejectsRowLongerThanItsRegion) {
  json["regions"][0][4] = 513;
  expectCorrupt("row");
}
TEST_F(TableJson, RejectsRegionBytesWhoseSumOverflows) {
  json["regions"][0][3] = ~uint64_t{0};
  expectCorrupt("sum");
}
TEST_F(TableJson, RejectsEarlyBytesOutsideOfThePayloadOrOffChunks) {
  json["early_bytes"] = 1;
  expectCorrupt("early");
}

class ParityTableJson : public testing::Test {
 protected:
  GroupInfo group{"g", {0, 1, 2}, {{0, 1, 2}}};
  Json json = Json::parse(
      buildTable(0, 3, {region("a", 90, 64, 0)}, {group}, "aec", {{0, 3}}, kChunk).toJson());
  void expectCorrupt(const std::string& what) {
    EXPECT_THROW(SnapshotTable::fromJson(json.dump()), Corruption) << what;
  }
};

TEST_F(ParityTableJson, IsValidUnchanged) {
  ASSERT_EQ(json["parities"].size(), 1u);
  EXPECT_TRUE(SnapshotTable::fromJson(json.dump()).holdsParityOf(0));
}
TEST_F(ParityTableJson, RejectsSetsThatTheGroupCannotHave) {
  for (const Json& sets : {Json::parse("[[0,3]]"), Json::parse("[[0,0]]"),
                           Json::parse("[[0,1],[1,2]]"), Json::parse("[7]"), Json(7)}) {
    json["groups"][0][2] = sets;
    expectCorrupt(sets.dump());
  }
}
TEST_F(ParityTableJson, RejectsAParityOfAnUnknownGroup) {
  json["parities"][0][0] = 1;
  expectCorrupt("group");
}
TEST_F(ParityTableJson, RejectsAParityBeyondThePayloadOrOverAPiece) {
  const Json whole = json;
  for (const uint64_t offset : {uint64_t{1} << 63, ~uint64_t{0}}) {
    json["parities"][0][3] = offset;
    expectCorrupt("offset " + std::to_string(offset));
  }
  json = whole;
  json["parities"][0][2] = ~uint64_t{0};
  expectCorrupt("end");
  json = whole;
  json["parities"][0][3] = 64;
  expectCorrupt("in a piece");
  json = whole;
  json["parities"][0][3] = 0;
  expectCorrupt("before a piece");
}
TEST_F(ParityTableJson, AParityThatIsNotTheWholeOneIsNotHeld) {
  json["parities"][0][1] = 64;
  EXPECT_FALSE(SnapshotTable::fromJson(json.dump()).holdsParityOf(0));
}
TEST_F(ParityTableJson, RejectsAParityOfARankWithoutASet) {
  json["groups"][0][2] = Json::array();
  expectCorrupt("no set");
  json["groups"][0][2] = Json::parse("[[1,2]]");
  expectCorrupt("in another set");
  json["groups"][0][2] = Json::parse("[[0],[1,2]]");
  expectCorrupt("alone");
}
TEST(BuildTable, RefusesAParityWithoutASetOrOfAnotherMember) {
  EXPECT_THROW(buildTable(0, 3, {}, {groupOf(3)}, "aec", {{0, 3}}, kChunk), InvalidArgument);
  GroupInfo group = groupOf(3);
  group.sets = {{0, 1, 2}};
  EXPECT_THROW(buildTable(0, 3, {}, {group}, "aec", {{0, 4}}, kChunk), InvalidArgument);
}

}  // namespace table_test
}  // namespace reft
