#include "intercept/record/device_ops.h"

#include <memory>

#include <gtest/gtest.h>

#include "tests/fakes/scripted_driver.h"

#include "intercept/driver/device_error.h"
#include "intercept/record/op_log.h"

namespace reft {
namespace device_ops_test {

class DeviceOpsTest : public ::testing::Test {
 protected:
  void SetUp() override { ops_->use(true); }
  // What is asked from now on is written when the device comes to the end.
  void holdDevice() { driver_.copies_until_ns += 1000; }
  uint64_t begin() { return log_.begin({.kind = OpKind::kAllreduce, .group = 0, .seq = 1}); }
  OpEntry newest() const { return OpLogReader(log_.area(), log_.areaBytes()).tail(1).at(0); }

  ScriptedDriver driver_;
  CudaApi api_ = driver_.api();
  std::unique_ptr<DeviceOps> ops_ = std::make_unique<DeviceOps>(&api_);
  OpLog log_{nullptr, 256};
};

TEST_F(DeviceOpsTest, AStreamSaysWhenItReachesAndHasPassedAnOp) {
  EXPECT_FALSE(ops_->reached(7));
  EXPECT_TRUE(ops_->markReach(7, ScriptedDriver::kTraining));
  EXPECT_TRUE(ops_->reached(7));
  EXPECT_FALSE(ops_->passed(7));
  holdDevice();
  EXPECT_TRUE(ops_->markPass(7, ScriptedDriver::kTraining));
  EXPECT_FALSE(ops_->passed(7));
  driver_.comeToTheEnd();
  EXPECT_TRUE(ops_->passed(7));
  EXPECT_FALSE(ops_->reached(7 + DeviceOps::kOps));
}

TEST_F(DeviceOpsTest, NothingIsAskedBeforeUseOrOfAStreamThatIsCaptured) {
  ops_->use(false);
  EXPECT_FALSE(ops_->markReach(1, ScriptedDriver::kTraining));
  ops_->use(true);
  driver_.capturing = true;
  EXPECT_FALSE(ops_->markReach(1, ScriptedDriver::kTraining));
  driver_.capturing = false;
  EXPECT_TRUE(ops_->markReach(1, ScriptedDriver::kTraining));
}

TEST_F(DeviceOpsTest, ADriverThatHasRefusedIsNotAskedAgain) {
  const auto write = api_.streamWriteValue32;
  api_.streamWriteValue32 = [](cuda::Stream, cuda::Pointer, uint32_t, unsigned) { return 801; };
  EXPECT_FALSE(ops_->markReach(1, ScriptedDriver::kTraining));
  api_.streamWriteValue32 = write;
  EXPECT_FALSE(ops_->markReach(2, ScriptedDriver::kTraining));
}

TEST_F(DeviceOpsTest, AThreadWithoutAContextSpoilsNothing) {
  const auto write = api_.streamWriteValue32;
  const auto map = api_.memHostRegister;
  api_.memHostRegister = [](void*, size_t, unsigned) { return 201; };
  EXPECT_FALSE(ops_->markReach(1, ScriptedDriver::kTraining));
  api_.memHostRegister = map;
  api_.streamWriteValue32 = [](cuda::Stream, cuda::Pointer, uint32_t, unsigned) { return 201; };
  EXPECT_FALSE(ops_->markReach(1, ScriptedDriver::kTraining));
  api_.streamWriteValue32 = write;
  EXPECT_TRUE(ops_->markReach(1, ScriptedDriver::kTraining));
}

TEST_F(DeviceOpsTest, AProbeFindsADeviceThatHasFailedMeanwhile) {
  ops_->probe();  // before the first mark: nothing
  EXPECT_EQ(deviceError().code, 0);
  ASSERT_TRUE(ops_->markReach(1, ScriptedDriver::kTraining));
  ops_->probe();
  EXPECT_EQ(deviceError().code, 0);
  api_.eventQuery = [](cuda::Event) { return cuda::kNotReady; };
  ops_->probe();
  EXPECT_EQ(deviceError().code, 0);
  api_.eventQuery = [](cuda::Event) { return 700; };
  ops_->probe();
  EXPECT_EQ(deviceError().code, 700);
  EXPECT_GT(deviceError().at_ns, 0);
  api_.eventQuery = [](cuda::Event) { return 719; };
  ops_->probe();
  EXPECT_EQ(deviceError().code, 700) << "the first one counts";
}

TEST_F(DeviceOpsTest, AMachineWithoutADeviceIsNotAsked) {
  api_.devices = 0;
  EXPECT_FALSE(ops_->markReach(1, ScriptedDriver::kTraining));
}

TEST_F(DeviceOpsTest, TheLogLearnsOnlyOfOpsWhoseStreamsWereAsked) {
  const uint64_t other = begin();
  ASSERT_TRUE(ops_->markReach(other, ScriptedDriver::kTraining));  // and not noted in the log
  log_.refresh(*ops_);
  EXPECT_FALSE(newest().reach_asked || newest().reached);

  const uint64_t ticket = begin();
  ASSERT_TRUE(ops_->markReach(ticket, ScriptedDriver::kTraining));
  log_.flag(ticket, OpFlag::kReachAsked);
  holdDevice();
  ASSERT_TRUE(ops_->markPass(ticket, ScriptedDriver::kTraining));
  log_.flag(ticket, OpFlag::kPassAsked);
  EXPECT_FALSE(newest().reached);
  log_.refresh(*ops_);
  EXPECT_TRUE(newest().reach_asked && newest().reached && newest().pass_asked);
  EXPECT_FALSE(newest().passed || newest().failed);
  driver_.comeToTheEnd();
  log_.refresh(*ops_);
  EXPECT_TRUE(newest().passed);
  log_.markDone(ticket, /*failed=*/true);
  EXPECT_TRUE(newest().failed && newest().passed);
}

TEST_F(DeviceOpsTest, TheLogNotesHowSoonOpsWerePassed) {
  using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace)
  ManualClock clock;
  OpLog log(nullptr, 256, clock);
  const auto next = [&] {
    const uint64_t ticket = log.begin({.kind = OpKind::kAllreduce, .group = 0, .seq = 1});
    log.settle(*ops_);
    EXPECT_TRUE(ops_->markReach(ticket, ScriptedDriver::kTraining));
    log.flag(ticket, OpFlag::kReachAsked);
    EXPECT_TRUE(ops_->markPass(ticket, ScriptedDriver::kTraining));
    log.flag(ticket, OpFlag::kPassAsked);
  };
  next();
  clock.advance(400ms);
  next();  // finds the first passed
  holdDevice();
  next();
  clock.advance(2s);
  next();  // the device is still in the third
  driver_.comeToTheEnd();
  clock.advance(1s);
  next();
  const auto tail = OpLogReader(log.area(), log.areaBytes()).tail(8);
  std::vector<double> within;
  for (const OpEntry& entry : tail) {
    within.push_back(entry.passed_within_sec);
  }
  EXPECT_EQ(within, (std::vector<double>{0.5, 0.5, 4, 4, 0}));
}

TEST_F(DeviceOpsTest, MoreOpsThanTheLogHolds) {
  for (int i = 0; i < 1000; ++i) {
    const uint64_t ticket = begin();
    ASSERT_TRUE(ops_->markReach(ticket, ScriptedDriver::kTraining));
    log_.flag(ticket, OpFlag::kReachAsked);
  }
  log_.refresh(*ops_, 100'000);
  const auto tail = OpLogReader(log_.area(), log_.areaBytes()).tail(256);
  ASSERT_EQ(tail.size(), 256u);
  for (const OpEntry& entry : tail) {
    EXPECT_TRUE(entry.reached) << entry.ticket;
  }
}

}  // namespace device_ops_test
}  // namespace reft
