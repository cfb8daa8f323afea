#include "snapshot/state/parity_cells.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "intercept/base/error.h"

namespace reft {
namespace parity_cells_test {

std::vector<RegionInfo> randomRegions(std::mt19937_64& random) {
  std::vector<RegionInfo> regions;
  const uint64_t count = random() % 12;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t row = 1 + random() % 300, bytes = row * (random() % 30);
    const auto group = static_cast<int32_t>(random() % 3) - 1;
    regions.push_back({"r" + std::to_string(i),
                       "uint8",
                       {static_cast<int64_t>(bytes)},
                       bytes,
                       std::min(row, bytes),
                       group,
                       random() % 4 == 0});
  }
  return regions;
}

uint64_t bytesOf(const std::vector<ShardRange>& ranges) {
  uint64_t bytes = 0;
  for (const ShardRange& range : ranges) {
    bytes += range.end - range.begin;
  }
  return bytes;
}

// Ranges as single bytes.
std::vector<std::pair<uint32_t, uint64_t>> eachByte(const std::vector<ShardRange>& ranges) {
  std::vector<std::pair<uint32_t, uint64_t>> bytes;
  for (const ShardRange& range : ranges) {
    for (uint64_t at = range.begin; at < range.end; ++at) {
      bytes.emplace_back(range.region, at);
    }
  }
  return bytes;
}

TEST(ParityCells, TheCellsOfAShardAreItsBytesInOrder) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    const auto regions = randomRegions(random);
    const auto members = static_cast<uint32_t>(2 + random() % 6);
    std::vector<uint32_t> set(members);
    std::iota(set.begin(), set.end(), 0u);
    std::shuffle(set.begin(), set.end(), random);
    set.resize(2 + random() % (members - 1));
    const ParityCells cells(regions, 0, members, set);
    ASSERT_EQ(cells.bytes() % 64, 0u);
    uint64_t longest = 0;
    for (const uint32_t shard : set) {
      std::vector<ShardRange> all;
      for (const uint32_t keeper : set) {
        if (keeper != shard) {
          std::vector<ShardRange> cell;
          cells.ranges(shard, keeper, 0, cells.bytes(), cell);
          ASSERT_LE(bytesOf(cell), cells.bytes());
          all.insert(all.end(), cell.begin(), cell.end());
        }
      }
      const auto whole = shardRanges(regions, 0, shard, members);
      ASSERT_EQ(eachByte(all), eachByte(whole)) << "round " << round;
      longest = std::max(longest, bytesOf(whole));
    }
    ASSERT_LT(cells.bytes(), longest / (set.size() - 1) + 65) << "no longer than it must be";
  }
}

TEST(ParityCells, APartOfACellIsThatOfItsRanges) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 300; ++round) {
    const auto regions = randomRegions(random);
    const ParityCells cells(regions, 0, 3, {2, 0, 1});
    if (cells.bytes() == 0) {
      continue;
    }
    std::vector<ShardRange> whole, parts;
    cells.ranges(0, 2, 0, cells.bytes(), whole);
    for (uint64_t at = 0; at < cells.bytes();) {
      const uint64_t to = std::min(cells.bytes(), at + 1 + random() % 200);
      cells.ranges(0, 2, at, to, parts);
      at = to;
    }
    ASSERT_EQ(eachByte(parts), eachByte(whole));
  }
}

TEST(ParityCells, RefusesWhatIsNoSet) {
  for (const std::vector<uint32_t>& set :
       std::vector<std::vector<uint32_t>>{{}, {1}, {1, 1}, {0, 3}}) {
    EXPECT_THROW(ParityCells({}, 0, 3, set), InvalidArgument);
  }
}

// A rank's parity, as runs in its payload, in chunks that hold nothing else.
TEST(ParityCells, TablesStoreAParityOnceAndApart) {
  constexpr uint64_t kChunk = 4096;
  std::mt19937_64 random(3);
  for (int round = 0; round < 1000; ++round) {
    auto regions = randomRegions(random);
    for (RegionInfo& region : regions) {
      region.group = std::min(region.group, 0);
    }
    GroupInfo group{"g", {0, 1, 2}, {{0, 2, 1}}};
    const SnapshotTable table = buildTable(1, 3, regions, {group}, "aec", {{1, 4}}, kChunk);
    const uint64_t bytes = ParityCells(table, 0, 1).bytes();
    ASSERT_EQ(table.holdsParityOf(0), bytes > 0);
    uint64_t sum = 0;
    for (const ParityPiece& piece : table.parities) {
      sum += piece.end - piece.begin;
      ASSERT_EQ(piece.payload_offset % 64, 0u);
      ASSERT_LE(piece.payload_offset + (piece.end - piece.begin), table.payload_bytes);
      const uint64_t first = piece.payload_offset / kChunk;
      const uint64_t last = (piece.payload_offset + (piece.end - piece.begin) - 1) / kChunk;
      for (const Piece& other : table.pieces) {
        ASSERT_TRUE((other.payload_offset + (other.end - other.begin) - 1) / kChunk < first ||
                    other.payload_offset / kChunk > last);
      }
      // Early or not, as a whole; and so what lies under it: no early region under a late parity.
      const bool early = piece.payload_offset < table.early_bytes;
      for (const uint32_t shard : {0u, 2u}) {
        std::vector<ShardRange> under;
        ParityCells(table, 0, 1).ranges(shard, 1, piece.begin, piece.end, under);
        for (const ShardRange& range : under) {
          ASSERT_TRUE(early || !table.regions[range.region].early);
        }
      }
    }
    ASSERT_EQ(sum, bytes);
    const SnapshotTable again = SnapshotTable::fromJson(table.toJson());
    ASSERT_EQ(again.toJson(), table.toJson());
    ASSERT_EQ(again.holdsParityOf(0), bytes > 0);
    if (!table.parities.empty()) {
      SnapshotTable less = table;
      less.parities.pop_back();
      ASSERT_FALSE(less.holdsParityOf(0));
    }
  }
}

}  // namespace parity_cells_test
}  // namespace reft
