#include "hang_detect/evidence/words.h"

#include <gtest/gtest.h>

namespace reft::words {
namespace words_test {

// tests/unit/python/test_voice.py reads the same table.
TEST(Words, AreThoseOfPython) {
#define RANKS(text, ...) EXPECT_EQ(rankList({__VA_ARGS__}), text);
#define SIZE(text, count) EXPECT_EQ(bytes(count##ULL), text);
#include "../../words.inc"
#undef RANKS
#undef SIZE
}

}  // namespace words_test
}  // namespace reft::words
