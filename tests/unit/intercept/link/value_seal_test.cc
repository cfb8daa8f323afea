#include "intercept/link/value_seal.h"

#include <string>

#include <gtest/gtest.h>

#include "intercept/base/error.h"
#include "intercept/link/sha256.h"

namespace reft {
namespace value_seal_test {

std::string hex(const Sha256& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// RFC 4231, cases 1, 2 and 6.
TEST(HmacSha256, GivesTheValuesOfTheStandard) {
  EXPECT_EQ(hex(hmacSha256(std::string(20, '\x0b'), {"Hi ", "There"})),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmacSha256("Jefe", {"what do ya want for nothing?"})),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmacSha256(std::string(131, '\xaa'),
                           {"Test Using Larger Than Block-Size Key - Hash Key First"})),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// RFC 5869, case 1: its first 32 bytes.
TEST(HkdfSha256, GivesTheValuesOfTheStandard) {
  std::string salt;
  for (char c = 0; c <= 0x0c; ++c) {
    salt += c;
  }
  std::string info;
  for (int c = 0xf0; c <= 0xf9; ++c) {
    info += static_cast<char>(c);
  }
  EXPECT_EQ(hex(hkdfSha256(std::string(22, '\x0b'), salt, info)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
}

TEST(Sha256, ComparesAllBytes) {
  Sha256 a{};
  Sha256 b{};
  EXPECT_TRUE(sameInConstantTime(a, b));
  b.back() = 1;
  EXPECT_FALSE(sameInConstantTime(a, b));
}

class SealTest : public ::testing::Test {
 protected:
  const std::string secret_ = std::string(ValueSeal::kSecretBytes, 's');
  const ValueSeal seal_{secret_, "attempt 7", 4};
  const std::string value_ = seal_.seal(ValueKind::kRound, "identity/3", 3, "hello");

  std::optional<ValueSeal::Opened> open(const ValueSeal& seal, const std::string& value) const {
    return seal.open(ValueKind::kRound, "identity/3", 3, value);
  }
};

TEST_F(SealTest, OpensWhatItSealed) {
  const auto opened = open(seal_, value_);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->payload, "hello");
  EXPECT_EQ(opened->publisher, 3u);
  EXPECT_TRUE(open(ValueSeal(secret_, "attempt 7", 4), value_)) << "another rank of the attempt";
  EXPECT_EQ(seal_.open(ValueKind::kRound, "identity/3", ValueSeal::kAnyRank, value_)->publisher,
            3u);
  const std::string empty = seal_.seal(ValueKind::kRound, "identity/3", 3, "");
  EXPECT_EQ(open(seal_, empty)->payload, "");
}

TEST_F(SealTest, NothingElseOpens) {
  const uint64_t before = ValueSeal::refused();
  EXPECT_FALSE(open(ValueSeal(std::string(32, 'x'), "attempt 7", 4), value_)) << "an outsider's";
  EXPECT_FALSE(open(ValueSeal(secret_, "attempt 6", 4), value_)) << "replayed";
  EXPECT_FALSE(open(ValueSeal(secret_, "attempt 7", 5), value_)) << "of another size of the job";
  EXPECT_FALSE(seal_.open(ValueKind::kRound, "identity/2", 3, value_)) << "of another key";
  EXPECT_FALSE(seal_.open(ValueKind::kRound, "identity/3", 2, value_)) << "of another rank";
  EXPECT_FALSE(seal_.open(ValueKind::kAgent, "identity/3", 3, value_)) << "of another kind";
  EXPECT_EQ(ValueSeal::refused(), before + 6);
}

TEST_F(SealTest, NoByteCanBeChangedAddedOrTakenAway) {
  for (size_t i = 0; i < value_.size(); ++i) {
    std::string changed = value_;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(open(seal_, changed)) << "byte " << i;
    EXPECT_FALSE(open(seal_, value_.substr(0, i))) << "cut at " << i;
  }
  EXPECT_FALSE(open(seal_, value_ + "x"));
}

TEST_F(SealTest, LengthsAreBounded) {
  EXPECT_FALSE(seal_.open(ValueKind::kRound, "identity/3", 3, value_, 4));
  EXPECT_TRUE(seal_.open(ValueKind::kRound, "identity/3", 3, value_, 5));
  EXPECT_THROW(seal_.seal(ValueKind::kVote, "v", 0, std::string(65, 'x')), InvalidArgument);
  EXPECT_FALSE(seal_.open(ValueKind::kVote, "v", 0, std::string(1 << 20, 'x')));
  EXPECT_THROW(ValueSeal("too short", "attempt", 1), InvalidArgument);
}

TEST_F(SealTest, AKeyNameCannotRunIntoThePayload) {
  const std::string one = seal_.seal(ValueKind::kRound, "a", 0, "bc");
  EXPECT_FALSE(seal_.open(ValueKind::kRound, "ab", 0, one));
}

}  // namespace value_seal_test
}  // namespace reft
