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

}  // namespace xor_test
}  // namespace reft
