#include "python/rank/rank_options.h"

#include <gtest/gtest.h>

#include <map>

#include "intercept/base/error.h"

namespace reft {
namespace rank_options_test {

using namespace std::chrono_literals;

RankOptions optionsOf(const std::map<std::string, std::string>& settings) {
  return RankOptions::from(Env::parse([&](const std::string& name) -> std::optional<std::string> {
    const auto at = settings.find(name);
    return at == settings.end() ? std::nullopt : std::optional(at->second);
  }));
}

TEST(RankOptions, SettingsReachTheOptions) {
  const RankOptions options = optionsOf({{"REFT_SNAPSHOT_SLOTS", "3"},
                                         {"REFT_SNAPSHOT_VERIFY", "full"},
                                         {"REFT_SNAPSHOT_EVERY", "4"},
                                         {"REFT_SNAPSHOT_POLICY", "gap"},
                                         {"REFT_SNAPSHOT_WAIT_SEC", "0.5"},
                                         {"REFT_SNAPSHOT_OVERHEAD_PERCENT", "7"},
                                         {"REFT_SNAPSHOT_PROTECTION", "arc:2"}});
  EXPECT_EQ(options.slots, 3u);
  EXPECT_TRUE(options.verify_full);
  EXPECT_EQ(options.every, 4u);
  EXPECT_EQ(options.policy, PlacementPolicy::kGap);
  EXPECT_EQ(options.slot_wait, 500ms);
  EXPECT_EQ(options.overhead_percent, 7u);
  ASSERT_NE(options.redundancy.stored, nullptr);
  EXPECT_EQ(options.redundancy.stored->name(), "arc:2");
  EXPECT_EQ(options.redundancy.stored->losses(8), 2u);
  EXPECT_FALSE(options.redundancy.copied);
}

TEST(RankOptions, DefaultsTakeASnapshotEveryStepAndSurviveKilledProcesses) {
  const RankOptions options = optionsOf({});
  EXPECT_EQ(options.every, 1u);
  EXPECT_FALSE(options.verify_full);
  EXPECT_EQ(options.policy, PlacementPolicy::kGap);
  EXPECT_EQ(options.redundancy.stored->name(), "none");
  EXPECT_EQ(options.redundancy.stored->losses(8), 0u);
  EXPECT_GT(options.alarm, 0s);
}

TEST(RankOptions, ASettingSaysWhatRanksStoreAndWhetherAgentsCopy) {
  const auto named = [](std::string_view setting) {
    const Redundancy redundancy = redundancyNamed(setting);
    return std::pair{std::string(redundancy.stored->name()), redundancy.copied};
  };
  EXPECT_EQ(named("none"), std::pair(std::string("none"), false));
  EXPECT_EQ(named("peer"), std::pair(std::string("none"), true));
  EXPECT_EQ(named("arc:2+peer"), std::pair(std::string("arc:2"), true));
  EXPECT_EQ(named("aor"), std::pair(std::string("arc"), false));
  EXPECT_EQ(named("aor+peer"), std::pair(std::string("arc"), true));
  EXPECT_EQ(named("auto"), std::pair(std::string("none"), false));  // until the ranks agree
  EXPECT_THROW(redundancyNamed("parity"), InvalidArgument);
}

TEST(RankOptions, SnapshotsOffMeansNoAlarm) {
  EXPECT_EQ(optionsOf({{"REFT_SNAPSHOT", "0"}}).alarm, 0s);
}

TEST(RankOptions, APolicyThatIsNoneIsRefused) {
  EXPECT_THROW(policyNamed("paper"), InvalidArgument);
}

}  // namespace rank_options_test
}  // namespace reft
