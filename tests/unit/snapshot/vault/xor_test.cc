#include "snapshot/vault/xor.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace reft {
namespace xor_test {

TEST(Xor, IsThatOfEachByteAtEveryLengthAndAlignment) {
  std::mt19937 random(1);
  std::vector<std::byte> a(1200), b(1200);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<std::byte>(random());
    b[i] = static_cast<std::byte>(random());
  }
  for (size_t from = 0; from < 40; from += 3) {
    for (size_t bytes = 0; bytes < 1100; bytes += bytes < 300 ? 1 : 37) {
      std::vector<std::byte> sum = a;
      xorInto(sum.data() + from, b.data() + from / 2, bytes);
      for (size_t i = 0; i < sum.size(); ++i) {
        const bool inside = i >= from && i < from + bytes;
        ASSERT_EQ(sum[i], inside ? a[i] ^ b[i - from + from / 2] : a[i]);
      }
    }
  }
}

// Of any number of sources, lengths and alignments; also into one of them.
TEST(XorOf, IsTheXorOfAll) {
  std::mt19937_64 random(3);
  for (const size_t count : {1u, 2u, 3u, 7u, 16u, 19u}) {
    for (const size_t bytes : {0u, 1u, 7u, 64u, 255u, 256u, 300u, 1000u, 4099u}) {
      const size_t shift = random() % 40;
      std::vector<std::vector<std::byte>> arrays(count, std::vector<std::byte>(bytes + shift));
      std::vector<std::byte> expected(bytes), found(bytes + shift);
      std::vector<const std::byte*> with;
      for (std::vector<std::byte>& array : arrays) {
        for (std::byte& byte : array) {
          byte = static_cast<std::byte>(random());
        }
        for (size_t i = 0; i < bytes; ++i) {
          expected[i] ^= array[shift + i];
        }
        with.push_back(array.data() + shift);
      }
      xorOf(found.data() + shift, with, bytes);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found.data() + shift));
      xorOf(arrays[0].data() + shift, with, bytes);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), arrays[0].data() + shift))
          << count << " arrays of " << bytes << " bytes";
    }
  }
}

}  // namespace xor_test
}  // namespace reft
