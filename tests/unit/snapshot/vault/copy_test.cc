#include "snapshot/vault/copy.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <random>
#include <vector>

#include "snapshot/vault/hash.h"

namespace reft {
namespace copy_test {

std::vector<std::byte> noise(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& b : data) {
    b = static_cast<std::byte>(random());
  }
  return data;
}

TEST(ChunkHasher, CopiesExactlyAndHashesLikePortableXxh3) {
  std::mt19937_64 random(1);
  ChunkHasher hasher;
  for (int round = 0; round < 200; ++round) {
    const size_t bytes = round < 100 ? random() % 300 : random() % 600'000;
    const size_t from = random() % 70;
    const size_t to = random() % 70;
    const auto source = noise(bytes + 70, random());
    std::vector<std::byte> target(bytes + 140, std::byte{0xEE});
    hasher.reset();
    hasher.copy(target.data() + to, source.data() + from, bytes);
    ASSERT_EQ(std::memcmp(target.data() + to, source.data() + from, bytes), 0) << bytes;
    ASSERT_EQ(hasher.digest(), XXH3_64bits(source.data() + from, bytes)) << bytes;
    ASSERT_EQ(hashBytes(source.data() + from, bytes, 7),
              XXH3_64bits_withSeed(source.data() + from, bytes, 7))
        << bytes;
    for (size_t i = 0; i < target.size(); ++i) {
      if (i < to || i >= to + bytes) {
        ASSERT_EQ(target[i], std::byte{0xEE}) << "wrote outside at " << i;
      }
    }
  }
}

TEST(ChunkHasher, DigestOfPiecesAndPaddingIsThatOfTheWhole) {
  const auto source = noise(10'000, 2);
  std::vector<std::byte> target(12'000, std::byte{0xEE});
  ChunkHasher hasher;
  hasher.copy(target.data(), source.data(), 4'001);
  hasher.zero(target.data() + 4'001, 95);
  hasher.copy(target.data() + 4'096, source.data() + 4'001, 5'999);
  hasher.zero(target.data() + 10'095, 1'905);
  EXPECT_EQ(hasher.digest(), hashBytes(target.data(), target.size()));
}

TEST(ChunkHasher, NothingHashesLikeNothing) {
  ChunkHasher hasher;
  hasher.copy(nullptr, nullptr, 0);
  EXPECT_EQ(hasher.digest(), hashBytes(nullptr, 0));
}

TEST(SampleHash, SeesEveryByteOfSmallRegions) {
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{4096}}) {
    auto data = noise(bytes, bytes);
    const uint64_t before = sampleHash(data.data(), bytes, 4, 9);
    for (size_t i = 0; i < bytes; ++i) {
      data[i] ^= std::byte{1};
      ASSERT_NE(sampleHash(data.data(), bytes, 4, 9), before) << i;
      data[i] ^= std::byte{1};
    }
    EXPECT_EQ(sampleHash(data.data(), bytes, 4, 9), before);
  }
}

TEST(SampleHash, SeesEveryByteWithZeroSamplesOrEnough) {
  auto data = noise(70'001, 1);
  for (const uint32_t samples : {0u, 70'001u / 64}) {
    const uint64_t before = sampleHash(data.data(), data.size(), samples, 9);
    data.back() ^= std::byte{1};
    EXPECT_NE(sampleHash(data.data(), data.size(), samples, 9), before);
    data.back() ^= std::byte{1};
  }
}

TEST(SampleHash, SeesAStretchAsLongAsTwoStrata) {
  constexpr uint32_t kSamples = 16;
  auto data = noise(1 << 20, 3);
  const uint64_t before = sampleHash(data.data(), data.size(), kSamples, 5);
  const size_t stretch = 2 * data.size() / kSamples;
  for (size_t at = 0; at + stretch <= data.size(); at += 37'777) {
    auto changed = data;
    for (size_t i = at; i < at + stretch; ++i) {
      changed[i] ^= std::byte{0x80};
    }
    EXPECT_NE(sampleHash(changed.data(), changed.size(), kSamples, 5), before) << at;
  }
}

TEST(SampleHash, SeesAChangeOfEveryElementWhateverTheSeed) {
  auto data = noise(1 << 20, 4);
  auto changed = data;
  for (std::byte& b : changed) {
    b ^= std::byte{1};
  }
  for (uint64_t seed = 0; seed < 100; ++seed) {
    EXPECT_NE(sampleHash(data.data(), data.size(), 4, seed),
              sampleHash(changed.data(), changed.size(), 4, seed));
  }
}

TEST(SampleHash, DependsOnContentsSeedAndNothingElse) {
  const auto data = noise(1 << 18, 5);
  const auto copy = data;
  EXPECT_EQ(sampleHash(data.data(), data.size(), 100, 1),
            sampleHash(copy.data(), copy.size(), 100, 1));
  EXPECT_NE(sampleHash(data.data(), data.size(), 100, 1),
            sampleHash(data.data(), data.size(), 100, 2));
}

}  // namespace copy_test
}  // namespace reft
