#include "intercept/base/env.h"

#include <map>
#include <set>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft {
namespace env_test {

Env parse(const std::map<std::string, std::string>& variables) {
  return Env::parse([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string refusal(const std::string& name, const std::string& value) {
  try {
    parse({{name, value}});
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Env, DefaultsAreWellFormedAndNamesUnique) {
  const Env env = parse({});
  std::set<std::string> names;
  std::set<std::string> members;
  for (const EnvRow& row : Env::table()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(members.insert(row.member).second) << row.member;
    EXPECT_EQ(env.text(row.member), row.default_text);
  }
}

TEST(Env, ReadsEachKind) {
  const Env env = parse({{"REFT_STRICT", "1"},
                         {"REFT_SNAPSHOT_SLOTS", "3"},
                         {"REFT_SNAPSHOT_CHUNK_BYTES", "64k"},
                         {"REFT_CONNECT_SEC", "0.5"},
                         {"REFT_RESUME", "state"},
                         {"REFT_RUN_DIR", "/run/x"}});
  EXPECT_TRUE(env.flag("strict"));
  EXPECT_FALSE(env.flag("disable"));
  EXPECT_EQ(env.integer("snapshot_slots"), 3);
  EXPECT_EQ(env.integer("snapshot_chunk_bytes"), 64 << 10);
  EXPECT_DOUBLE_EQ(env.seconds("connect_sec"), 0.5);
  EXPECT_EQ(env.text("resume"), "state");
  EXPECT_EQ(env.text("run_dir"), "/run/x");
  EXPECT_EQ(env.text("snapshot_chunk_bytes"), "64k");
}

TEST(Env, BytesHaveBinarySuffixes) {
  const auto bytes = [](const std::string& text) {
    return parse({{"REFT_SNAPSHOT_HOST_BYTES", text}}).integer("snapshot_host_bytes");
  };
  EXPECT_EQ(bytes("0"), 0);
  EXPECT_EQ(bytes("123"), 123);
  EXPECT_EQ(bytes("4M"), int64_t{4} << 20);
  EXPECT_EQ(bytes("3G"), int64_t{3} << 30);
  EXPECT_EQ(bytes("2T"), int64_t{2} << 40);
}

TEST(Env, AnEmptyValueCountsAsNotSet) {
  EXPECT_EQ(parse({{"REFT_SNAPSHOT_SLOTS", ""}}).integer("snapshot_slots"), 2);
}

TEST(Env, RefusalNamesVariableValueAndWhatIsAllowed) {
  EXPECT_EQ(refusal("REFT_SNAPSHOT_SLOTS", "7"), "REFT_SNAPSHOT_SLOTS is '7'; allowed: 2..3");
  EXPECT_EQ(refusal("REFT_SNAPSHOT_OVERHEAD_PERCENT", "0.5"),
            "REFT_SNAPSHOT_OVERHEAD_PERCENT is '0.5'; allowed: 0..100, whole numbers");
  EXPECT_EQ(refusal("REFT_RESUME", "exactly"),
            "REFT_RESUME is 'exactly'; allowed: exact|state|off");
  EXPECT_EQ(refusal("REFT_DISABLE", "true"), "REFT_DISABLE is 'true'; allowed: 0|1");
}

TEST(Env, RefusesWhatIsNotWhollyAValue) {
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {"REFT_SNAPSHOT_SLOTS", "2x"},
           {"REFT_SNAPSHOT_SLOTS", " 2"},
           {"REFT_SNAPSHOT_SLOTS", "2.0"},
           {"REFT_SNAPSHOT_SLOTS", "99999999999999999999"},
           {"REFT_SNAPSHOT_CHUNK_BYTES", "4X"},
           {"REFT_SNAPSHOT_CHUNK_BYTES", "M"},
           {"REFT_SNAPSHOT_CHUNK_BYTES", "2G"},
           {"REFT_SNAPSHOT_HOST_BYTES", "-1"},
           {"REFT_SNAPSHOT_HOST_BYTES", "9000000T"},
           {"REFT_CONNECT_SEC", "nan"},
           {"REFT_CONNECT_SEC", "1e3"},
           {"REFT_CONNECT_SEC", "-1"}}) {
    EXPECT_THAT(refusal(name, value), testing::StartsWith(name + " is '" + value + "'; allowed: "));
  }
}

TEST(Env, UnknownNamesComeWithTheNearest) {
  using Pair = std::pair<std::string, std::string>;
  EXPECT_THAT(
      Env::unknown({"REFT_SNAPSHOT_SLOT", "REFT_STRICT", "PATH", "REFT_SOMETHING_ELSE_ALTOGETHER"}),
      testing::ElementsAre(Pair("REFT_SNAPSHOT_SLOT", "REFT_SNAPSHOT_SLOTS"),
                           Pair("REFT_SOMETHING_ELSE_ALTOGETHER", "")));
}

TEST(Env, AskingForAWrongMemberIsABug) {
  const Env env = parse({});
  EXPECT_THROW(env.flag("no_such_member"), std::logic_error);
  EXPECT_THROW(env.flag("snapshot_slots"), std::logic_error);
}

}  // namespace env_test
}  // namespace reft
