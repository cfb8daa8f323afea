#include "intercept/base/json.h"

#include <string>

#include <gtest/gtest.h>

namespace reft {
namespace json_test {

std::string nested(int depth, const char* open, const char* close) {
  std::string text;
  for (int i = 0; i < depth; ++i) {
    text += open;
  }
  text += "1";
  for (int i = 0; i < depth; ++i) {
    text += close;
  }
  return text;
}

TEST(Json, ReadsWhatIsNestedAsDeepAsReftWrites) {
  EXPECT_EQ(parseJson(R"({"a": [1, "x"]})")["a"][1], "x");
  EXPECT_FALSE(parseJson(nested(kDeepestJson, "[", "]")).is_discarded());
  EXPECT_FALSE(parseJson(nested(kDeepestJson, R"({"a":)", "}")).is_discarded());
}

TEST(Json, WhatIsDeeperIsNotBuilt) {
  for (const auto& text :
       {nested(kDeepestJson + 1, "[", "]"), nested(kDeepestJson + 1, R"({"a":)", "}"),
        std::string(200'000, '['), nested(200'000, "[", "]"), nested(100'000, R"([{"a":)", "}]")}) {
    EXPECT_TRUE(parseJson(text).is_discarded());
  }
}

TEST(Json, BracketsInsideStringsAreNoDepth) {
  const std::string inside = R"({"a":")" + std::string(100, '[') + R"(\"[{\\"})";
  EXPECT_EQ(depthOfJson(inside), 1);
  EXPECT_TRUE(parseJson(inside).is_object());
  EXPECT_TRUE(parseJson(R"("\)").is_discarded());
}

TEST(Json, WhatIsNoJsonOrTooLongIsDiscarded) {
  EXPECT_TRUE(parseJson("").is_discarded());
  EXPECT_TRUE(parseJson("]]]").is_discarded());
  EXPECT_TRUE(parseJson("[1").is_discarded());
  EXPECT_TRUE(parseJson("[1, 2]", 5).is_discarded());
  EXPECT_TRUE(parseJson("[1, 2]", 6).is_array());
}

}  // namespace json_test
}  // namespace reft
