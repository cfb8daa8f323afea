#include "agent/health/hardware_watch.h"

#include <deque>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft::agent {
namespace hardware_watch_test {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kTick = kSecond / 4;

// A program that answers when the test says so.
class ScriptedSource final : public SampleSource {
 public:
  bool ask() override {
    asked += starts ? 1 : 0;
    runs = starts;
    return starts;
  }
  std::optional<std::string> line() override {
    if (lines.empty()) {
      return std::nullopt;
    }
    std::string first = lines.front();
    lines.pop_front();
    return first;
  }
  bool running() override { return runs; }
  void kill() override {
    runs = false;
    ++kills;
  }

  std::deque<std::string> lines;
  int asked = 0, kills = 0;
  bool starts = true, runs = false;
};

class HardwareWatchTest : public ::testing::Test {
 protected:
  HardwareWatchTest() {
    sample.nvml = "ok";
    GpuSample& gpu = sample.gpus.emplace_back();
    gpu.index = 0;
    gpu.uuid = "GPU-1";
    gpu.pci = "00000000:3b:00.0";
    gpu.counters["ecc_volatile_uncorrected"] = 5;
  }

  void answer() {
    source.lines.push_back(hardwareSampleJson(sample));
    sample.xids.clear();
    watch.step(now);
  }
  void pass(int64_t ns, bool live = true) {
    for (const int64_t end = now + ns; now < end;) {
      now += kTick;
      watch.tick(live, now);
    }
  }
  uint64_t& ecc() { return sample.gpus[0].counters["ecc_volatile_uncorrected"]; }

  ScriptedSource source;
  HardwareWatch watch{source, true};
  HardwareSample sample;
  int64_t now = 1000 * kSecond;
};

TEST_F(HardwareWatchTest, StartsNothingIfItIsNotWanted) {
  HardwareWatch none(source, false);
  none.joined(1, now);
  none.investigates(false, now);
  none.tick(true, now + HardwareWatch::kEveryNs);
  EXPECT_EQ(source.asked, 0);
  EXPECT_FALSE(none.sampling());
}

TEST_F(HardwareWatchTest, SamplesOnceWhenTheRanksOfAnAttemptJoin) {
  watch.joined(1, now);
  watch.joined(1, now);
  EXPECT_EQ(source.asked, 1);
  EXPECT_TRUE(watch.sampling());
  EXPECT_EQ(watch.newest(), nullptr);
  answer();
  EXPECT_FALSE(watch.sampling());
  EXPECT_TRUE(watch.hasGpus());
  EXPECT_THAT(watch.notes(), IsEmpty());
}

TEST_F(HardwareWatchTest, ComparesTheNewestSampleWithTheFirst) {
  watch.joined(1, now);
  answer();
  ecc() = 7;
  now += 2 * kSecond;
  watch.investigates(false, now);
  EXPECT_TRUE(watch.sampling());
  answer();
  EXPECT_THAT(watch.notes(),
              ElementsAre(HardwareNote{0, true,
                                       "GPU 0 (GPU-1): 2 uncorrectable ECC errors since the job "
                                       "began"}));
}

TEST_F(HardwareWatchTest, KeepsNotesOfAnEarlierAttemptButNotAsFatal) {
  watch.joined(1, now);
  answer();
  ecc() = 7;
  sample.xids = {{48, "0000:3b:00", 0, 1, 0}};
  watch.investigates(false, now += 2 * kSecond);
  answer();
  EXPECT_THAT(watch.notes(),
              ElementsAre(Field(&HardwareNote::fatal, true), Field(&HardwareNote::fatal, true)));
  watch.joined(2, now += 2 * kSecond);
  answer();
  EXPECT_THAT(watch.notes(),
              ElementsAre(Field(&HardwareNote::fatal, false), Field(&HardwareNote::fatal, false)));
}

TEST_F(HardwareWatchTest, TakesASampleOfItsOwnForAnAttemptThatJoinsDuringOne) {
  watch.joined(1, now);
  answer();
  watch.investigates(false, now += 2 * kSecond);
  watch.joined(2, now);
  answer();  // to the investigation
  EXPECT_TRUE(watch.sampling());
  ecc() = 9;  // in between: before the attempt began, for all that is known
  answer();
  EXPECT_THAT(watch.notes(), ElementsAre(Field(&HardwareNote::fatal, false)));
}

TEST_F(HardwareWatchTest, AddsUpXids) {
  watch.joined(1, now);
  answer();
  for (int i = 0; i < 2; ++i) {
    sample.xids = {{31, "0000:3b:00", 42, 1, 1}};
    watch.investigates(false, now += 2 * kSecond);
    answer();
  }
  ASSERT_EQ(watch.newest()->xids.size(), 1U);
  EXPECT_EQ(watch.newest()->xids[0].count(), 2U);
}

TEST_F(HardwareWatchTest, SamplesOnceAMinuteWhileRanksLive) {
  watch.joined(1, now);
  answer();
  pass(HardwareWatch::kEveryNs - kSecond);
  EXPECT_EQ(source.asked, 1);
  pass(kSecond);
  EXPECT_EQ(source.asked, 2);
}

TEST_F(HardwareWatchTest, SamplesMoreRarelyIfASampleIsDear) {
  sample.took_sec = 0.5;
  watch.joined(1, now);
  answer();
  pass(500 * kSecond - kSecond);
  EXPECT_EQ(source.asked, 1);
  pass(kSecond);
  EXPECT_EQ(source.asked, 2);
}

TEST_F(HardwareWatchTest, TakesNoOtherSampleForAnInvestigationIfTheNewestIsFresh) {
  watch.joined(1, now);
  answer();
  watch.investigates(false, now += kSecond / 2);
  EXPECT_EQ(source.asked, 1);
  watch.investigates(false, now += kSecond);
  EXPECT_EQ(source.asked, 2);
}

TEST_F(HardwareWatchTest, TakesAnotherOneAfterACrashInAnyCase) {
  watch.joined(1, now);
  answer();
  watch.investigates(true, now += kSecond / 8);
  EXPECT_EQ(source.asked, 2);
  watch.investigates(true, now += kSecond / 8);
  EXPECT_EQ(source.asked, 2) << "one at a time";
  answer();  // it may have been read before the second crash
  EXPECT_EQ(source.asked, 3);
  EXPECT_TRUE(watch.sampling());
  answer();
  EXPECT_FALSE(watch.sampling());
}

TEST_F(HardwareWatchTest, ComparesACrashDuringTheFirstSampleOfTheAttemptWithThatSample) {
  watch.joined(1, now);
  watch.investigates(true, now += kSecond / 8);
  answer();
  ecc() = 6;
  answer();
  EXPECT_THAT(watch.notes(), ElementsAre(Field(&HardwareNote::fatal, true)));
}

TEST_F(HardwareWatchTest, EndsAProgramThatDoesNotAnswerAndSaysSo) {
  watch.joined(1, now);
  answer();
  watch.investigates(false, now += 2 * kSecond);
  pass(HardwareWatch::kAnswerNs);
  EXPECT_EQ(source.kills, 1);
  EXPECT_FALSE(watch.sampling());
  EXPECT_THAT(watch.notes(), ElementsAre(Field(&HardwareNote::text, HasSubstr("does not answer"))));
  watch.investigates(false, now);
  EXPECT_EQ(source.asked, 2) << "not at once again";
  pass(61 * kSecond);
  EXPECT_EQ(source.asked, 3);
  answer();
  EXPECT_THAT(watch.notes(), IsEmpty());
}

TEST_F(HardwareWatchTest, DoesNotBlameTheProgramIfTheAgentItselfStoodStill) {
  watch.joined(1, now);
  watch.tick(true, now += 100 * kSecond);
  EXPECT_EQ(source.kills, 0);
  answer();
  EXPECT_THAT(watch.notes(), IsEmpty());
}

TEST_F(HardwareWatchTest, TakesTheEndOfTheProgramForNoAnswer) {
  watch.joined(1, now);
  source.runs = false;
  watch.step(now);
  EXPECT_FALSE(watch.sampling());
  EXPECT_EQ(watch.newest(), nullptr);
  watch.investigates(false, now += 2 * kSecond);
  EXPECT_EQ(source.asked, 1) << "it may end again";
}

TEST_F(HardwareWatchTest, KeepsTheGpusOfTheLastAnswerOfNvml) {
  watch.joined(1, now);
  answer();
  ecc() = 6;
  watch.investigates(false, now += 2 * kSecond);
  answer();
  sample.gpus.clear();
  sample.nvml = "silent";
  sample.nvml_text = "nvmlDeviceGetPowerUsage of GPU 0 has not returned for 4 s";
  watch.investigates(false, now += 2 * kSecond);
  answer();
  EXPECT_THAT(watch.notes(), ElementsAre(Field(&HardwareNote::text, HasSubstr("1 uncorrectable")),
                                         Field(&HardwareNote::text, HasSubstr("NVML does not"))));
}

TEST_F(HardwareWatchTest, IgnoresLinesThatAreNoSample) {
  watch.joined(1, now);
  for (const char* line : {"", "{", "[1]", R"({"sample": "other"})", "\xff\xfe"}) {
    source.lines.emplace_back(line);
  }
  watch.step(now);
  EXPECT_TRUE(watch.sampling());
  EXPECT_EQ(watch.newest(), nullptr);
}

TEST_F(HardwareWatchTest, EndsTheProgramWhenNoRankHasLivedForAWhile) {
  watch.joined(1, now);
  answer();
  pass(HardwareWatch::kIdleNs, false);
  EXPECT_EQ(source.kills, 0);
  pass(kSecond, false);
  EXPECT_EQ(source.kills, 1);
  pass(200 * kSecond, false);
  EXPECT_EQ(source.asked, 1);
  watch.joined(2, now);
  EXPECT_EQ(source.asked, 2);
}

}  // namespace hardware_watch_test
}  // namespace reft::agent
