#include "intercept/base/hash.h"

#include <bit>

#include <gtest/gtest.h>

namespace reft {
namespace hash_test {

// Values that ranks of one job compare, and that files hold.
static_assert(splitmix64(0) == 0xE220A8397B1DCDAF);
static_assert(splitmix64(kGoldenRatio) == 0x6E789E6AA1B965F4);
static_assert(mixed(0) == 0);
static_assert(mixed(1) == 0x5692161D100B05E5);
static_assert(hashCombine(0, 1) == 0x9E3779B9E17D05AC);

TEST(Hash, EveryBitOfTheWordMovesTheResult) {
  for (int bit = 0; bit < 64; ++bit) {
    const int moved = std::popcount(mixed(12345) ^ mixed(12345 ^ (uint64_t{1} << bit)));
    EXPECT_GT(moved, 16) << bit;
    EXPECT_LT(moved, 48) << bit;
  }
}

TEST(Hash, CombineTellsTheOrderOfTheWords) {
  EXPECT_NE(hashCombine(hashCombine(0, 1), 2), hashCombine(hashCombine(0, 2), 1));
}

}  // namespace hash_test
}  // namespace reft
