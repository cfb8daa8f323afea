#include "snapshot/engine/telemetry.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "snapshot/vault/reader.h"
#include "snapshot/vault/span_log.h"

namespace reft {
namespace telemetry_test {

class TelemetryTest : public testing::Test {
 protected:
  static int64_t signedOf(const std::atomic<uint64_t>& value) {
    return static_cast<int64_t>(value.load());
  }
  std::vector<Span> spans() const {
    const VaultReader reader(vault_->fd());
    return SpanLogReader(reader.spanLogArea(), reader.spanLogBytes()).tail(100);
  }

  std::unique_ptr<Vault> vault_ = Vault::create({"job", 0, 1}, 2, 64);
  Telemetry telemetry_{*vault_, 9};
  RankStats& stats_ = vault_->stats();
};

TEST_F(TelemetryTest, ANewEngineHasCommittedNothing) {
  EXPECT_EQ(stats_.incarnation.load(), 9u);
  EXPECT_EQ(signedOf(stats_.committed_step), -1);
  EXPECT_EQ(signedOf(stats_.sealed_step), -1);
}

TEST_F(TelemetryTest, AnUnknownOverheadIsToldApartFromASmallOne) {
  telemetry_.cost({.every = 4});
  EXPECT_EQ(stats_.every.load(), 4u);
  EXPECT_EQ(stats_.overhead_ppm.load(), ~uint64_t{0});
  EXPECT_EQ(stats_.overhead_noise_ppm.load(), ~uint64_t{0});
  telemetry_.cost({.every = 1, .known = true, .overhead_ppm = -1, .noise_ppm = 3});
  EXPECT_EQ(signedOf(stats_.overhead_ppm), 0);
  EXPECT_EQ(signedOf(stats_.overhead_noise_ppm), 3);
  telemetry_.cost({.every = 1, .known = true, .overhead_ppm = -2, .noise_ppm = 3});
  EXPECT_EQ(signedOf(stats_.overhead_ppm), -2);
}

TEST_F(TelemetryTest, ChunksThatFollowEachOtherAreOneSpan) {
  telemetry_.copied(5, Tier::kGap, 1'000, 2'000, 10);
  telemetry_.copied(5, Tier::kGap, 2'500, 3'000, 20);
  telemetry_.copied(5, Tier::kCompute, 3'000, 4'000, 30);
  telemetry_.copied(5, Tier::kCompute, 4'000 + 100'001, 200'000, 40);
  telemetry_.copied(6, Tier::kCompute, 200'000, 210'000, 50);
  const std::vector<Span> found = spans();
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].bytes, 30u);
  EXPECT_EQ(found[0].begin_ns, 1'000);
  EXPECT_EQ(found[0].end_ns, 3'000);
  EXPECT_EQ(found[3].step, 6);
  EXPECT_EQ(stats_.bytes_copied.load(), 150u);
  EXPECT_EQ(stats_.gap_copied_bytes.load(), 30u);
  EXPECT_EQ(stats_.compute_copied_bytes.load(), 120u);
}

TEST_F(TelemetryTest, AShortGateIsCountedButHasNoSpan) {
  telemetry_.gated(2, 0, 900);
  EXPECT_TRUE(spans().empty());
  telemetry_.gated(3, 1'000, 5'000);
  ASSERT_EQ(spans().size(), 1u);
  EXPECT_EQ(spans()[0].end_ns, 6'000);
  EXPECT_EQ(stats_.gate_ns.load(), 5'900u);
  EXPECT_EQ(stats_.gate_last_ns.load(), 5'000u);
}

TEST_F(TelemetryTest, EndsOfSnapshotsAreCountedAndDescribed) {
  telemetry_.skipped(1, "no slot");
  EXPECT_STREQ(stats_.note, "step 1 skipped: no slot");
  telemetry_.dropped(2, "w was written");
  EXPECT_STREQ(stats_.note, "step 2 dropped: w was written");
  telemetry_.dropped(3, "");
  EXPECT_STREQ(stats_.note, "step 2 dropped: w was written") << "no reason, no note";
  telemetry_.failed("out of memory");
  EXPECT_STREQ(stats_.note, "out of memory");
  telemetry_.notCommitted(4, false, false);
  EXPECT_STREQ(stats_.note, "out of memory") << "an outcome that needs no explanation";
  telemetry_.notCommitted(4, true, false);
  EXPECT_NE(std::strstr(stats_.note, "step 4 not committed"), nullptr);
  telemetry_.notCommitted(6, false, true);
  EXPECT_NE(std::strstr(stats_.note, "step 6 not committed: ranks that share state"), nullptr);
  telemetry_.sealed(5);
  telemetry_.committed(5, 77);
  EXPECT_EQ(stats_.skipped.load(), 1u);
  EXPECT_EQ(stats_.dropped.load(), 2u);
  EXPECT_EQ(stats_.errors.load(), 1u);
  EXPECT_EQ(stats_.sealed.load(), 1u);
  EXPECT_EQ(stats_.sealed_step.load(), 5u);
  EXPECT_EQ(stats_.committed_step.load(), 5u);
  EXPECT_EQ(stats_.commit_ns.load(), 77u);
}

TEST_F(TelemetryTest, ANoteThatIsTooLongIsCut) {
  telemetry_.note(std::string(2'000, 'x'));
  EXPECT_EQ(std::strlen(stats_.note), sizeof(stats_.note) - 1);
}

TEST_F(TelemetryTest, NotesOfTwoThreadsDoNotMix) {
  const std::string a(400, 'a');
  const std::string b(400, 'b');
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) {
      telemetry_.note(a);
    }
  });
  for (int i = 0; i < 200; ++i) {
    telemetry_.note(b);
  }
  other.join();
  EXPECT_TRUE(stats_.note == a || stats_.note == b);
}

TEST_F(TelemetryTest, ADevicesStepIsReportedByItsTimes) {
  DeviceTracker::Learned learned;
  learned.untimed[static_cast<size_t>(Tier::kCompute)] = 11;
  DeviceStep step;
  step.step = 4;
  step.begin_ns = 1'000;
  step.end_ns = 101'000;
  step.gate_begin_ns = 80'000;
  step.gate_end_ns = 90'000;
  step.waits = {{20'000, 40'000, OpKind::kRecv, 64, true}};
  step.copies = {{22'000, 30'000, 500, Tier::kCompute}};
  learned.steps = {step};
  telemetry_.device(learned);
  EXPECT_EQ(stats_.compute_copied_bytes.load(), 11u);
  EXPECT_EQ(stats_.gap_copied_bytes.load(), 500u) << "it ran while the device waited";
  EXPECT_EQ(stats_.device_gate_ns.load(), 10'000u);
  ASSERT_EQ(spans().size(), 4u);
  EXPECT_EQ(spans()[0].kind, SpanKind::kDeviceWait);
  EXPECT_EQ(spans()[1].kind, SpanKind::kCopy);
  EXPECT_EQ(spans()[2].kind, SpanKind::kDeviceGate);
  EXPECT_EQ(spans()[3].kind, SpanKind::kDeviceStep);
}

}  // namespace telemetry_test
}  // namespace reft
