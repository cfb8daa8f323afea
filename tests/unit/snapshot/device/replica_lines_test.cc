#include "snapshot/device/replica_lines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

namespace reft {
namespace replica_lines_test {

std::vector<std::byte> gather(const std::vector<std::vector<std::byte>>& regions,
                              const std::vector<ReplicaLine>& lines) {
  std::vector<std::byte> bytes(lines.size() * ReplicaLine::kMostBytes);
  for (size_t i = 0; i < lines.size(); ++i) {
    std::copy_n(regions[lines[i].region].begin() + static_cast<ptrdiff_t>(lines[i].offset),
                lines[i].bytes,
                bytes.begin() + static_cast<ptrdiff_t>(i * ReplicaLine::kMostBytes));
  }
  return bytes;
}

TEST(ReplicaLines, LieInTheirRegionsWhateverTheirSizes) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint64_t> sizes(random() % 20);
    for (uint64_t& size : sizes) {
      size = random() % 4 == 0 ? random() % 3 : random() % (uint64_t{1} << (random() % 36));
    }
    const uint64_t total = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
    const auto lines = replicaLines(sizes, random());
    EXPECT_EQ(lines.size(), std::min<uint64_t>(ReplicaLine::kPerGroup, (total + 63) / 64));
    for (const ReplicaLine& line : lines) {
      ASSERT_LT(line.region, sizes.size());
      ASSERT_GT(line.bytes, 0u);
      ASSERT_LE(line.bytes, ReplicaLine::kMostBytes);
      ASSERT_LE(line.offset + line.bytes, sizes[line.region]);
    }
  }
}

TEST(ReplicaLines, AreTheSameForEqualSizesAndSeedsAndMoveWithTheSeed) {
  const std::vector<uint64_t> sizes = {1 << 20, 100, 0, 5 << 20};
  std::set<std::pair<size_t, uint64_t>> seen;
  for (uint64_t step = 1; step <= 100; ++step) {
    const auto first = replicaLines(sizes, step);
    const auto second = replicaLines(sizes, step);
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(first[i].region, second[i].region);
      EXPECT_EQ(first[i].offset, second[i].offset);
      seen.insert({first[i].region, first[i].offset});
    }
  }
  EXPECT_GT(seen.size(), 1500u);
}

TEST(ReplicaLines, OneTensorOfManyIsFoundWithinItsShareOfTheSteps) {
  const std::vector<uint64_t> sizes(
      64, 1 << 16);  // the seventh differs: 1.6 % of the bytes, 16 lines a step
  int found = 0;
  for (uint64_t step = 0; step < 400; ++step) {
    const auto lines = replicaLines(sizes, step);
    found += std::any_of(lines.begin(), lines.end(),
                         [](const ReplicaLine& line) { return line.region == 7; });
  }
  EXPECT_GT(found, 60);
  EXPECT_LT(found, 140);
}

TEST(ReplicaLines, DigestTellsOneByteInOneLine) {
  std::vector<std::vector<std::byte>> regions = {std::vector<std::byte>(10'000),
                                                 std::vector<std::byte>(33)};
  const std::vector<uint64_t> sizes = {10'000, 33};
  const auto lines = replicaLines(sizes, 3);
  const auto bytes = gather(regions, lines);
  const uint64_t digest = replicaDigest(lines, bytes.data(), 3);
  EXPECT_EQ(replicaDigest(lines, gather(regions, lines).data(), 3), digest);
  for (const ReplicaLine& line : lines) {
    std::byte& one = regions[line.region][line.offset + line.bytes - 1];
    one ^= std::byte{1};
    EXPECT_NE(replicaDigest(lines, gather(regions, lines).data(), 3), digest);
    one ^= std::byte{1};
  }
}

TEST(ReplicaLines, WhatLiesBehindAShortLineDoesNotCount) {
  const auto lines = replicaLines(std::vector<uint64_t>{10}, 1);
  ASSERT_EQ(lines.size(), 1u);
  std::vector<std::byte> bytes(ReplicaLine::kMostBytes);
  const uint64_t digest = replicaDigest(lines, bytes.data(), 1);
  bytes[10] = std::byte{9};
  EXPECT_EQ(replicaDigest(lines, bytes.data(), 1), digest);
  EXPECT_NE(replicaDigest({}, nullptr, 0), 0u);
}

}  // namespace replica_lines_test
}  // namespace reft
