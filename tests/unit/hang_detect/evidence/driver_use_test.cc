#include "hang_detect/evidence/driver_use.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace reft {
namespace driver_use_test {

TEST(DriverUse, SurvivesJson) {
  DriverUse use;
  use.known = true;
  use.launches = 7;
  use.kernel = "k";
  use.launch_sec = 2.5;
  use.calls = {{70000, "cuStreamSynchronize", true, 9}};
  const DriverUse read = driverUseFrom(driverUseFields(use));
  EXPECT_TRUE(read.known);
  EXPECT_EQ(read.launches, 7);
  EXPECT_EQ(read.launchSentence(), use.launchSentence());
  ASSERT_NE(read.waitOf(static_cast<uint16_t>(70000)), nullptr);
  EXPECT_EQ(read.waitOf(1), nullptr);
  EXPECT_FALSE(driverUseFrom(driverUseFields({})).known);
  EXPECT_EQ(read.errorSentence(), "");
}

TEST(DriverUse, AFailedDeviceIsKnownWithoutTheLibrary) {
  DriverUse use;
  use.error = 700;
  use.error_sec = 41;
  const DriverUse read = driverUseFrom(driverUseFields(use));
  EXPECT_FALSE(read.known);
  EXPECT_EQ(read.launchSentence(), "");
  EXPECT_EQ(read.errorSentence(), "an illegal memory access (CUDA error 700), seen 41.0 s ago");
}

TEST(DriverUse, TakesDamagedFieldsForUnknown) {
  for (const char* text : {"null", "[]", "7", "\"x\""}) {
    EXPECT_FALSE(driverUseFrom(nlohmann::json::parse(text)).known) << text;
  }
  const DriverUse read = driverUseFrom(nlohmann::json::parse(
      R"({"observed": true, "error": -4, "error_sec": "x", "launches": -3, "kernel": 9, "launch_sec": "x", "calls": [7, {"tid": "a", "name": 1}]})"));
  EXPECT_TRUE(read.known);
  EXPECT_EQ(read.launches, 0);
  EXPECT_EQ(read.launchSentence(), "");
  EXPECT_EQ(read.errorSentence(), "");
  ASSERT_EQ(read.calls.size(), 1u);
  EXPECT_FALSE(read.calls[0].waits);
  nlohmann::json many;
  for (int i = 0; i < 1000; ++i) {
    many["calls"].push_back({{"tid", i}, {"name", std::string(5000, 'x')}});
  }
  const DriverUse bounded = driverUseFrom(many);
  EXPECT_EQ(bounded.calls.size(), 16u);
  EXPECT_EQ(bounded.calls[0].name.size(), 256u);
}

}  // namespace driver_use_test
}  // namespace reft
