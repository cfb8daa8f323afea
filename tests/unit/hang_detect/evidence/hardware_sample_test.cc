#include "hang_detect/evidence/hardware_sample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"

namespace reft {
namespace hardware_sample_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

HardwareSample exampleSample() {
  HardwareSample sample;
  sample.nvml = "ok";
  sample.kernel_log = true;
  sample.took_sec = 0.25;
  sample.gpus = {{3, "GPU-ab12cd34-1", "00000000:3B:00.0", false, true, {{"pcie_replays", 7}}},
                 {4, "", "", true}};
  sample.network = {{"eth0", false, "up", {{"rx_errors", 5}}},
                    {"mlx5_0 port 1", true, "active", {{"link_downed", 1}}}};
  sample.xids = {{79, "0000:3b:00", 42, 1, 2}};
  return sample;
}

TEST(HardwareSample, ComesBackFromItsJson) {
  const HardwareSample sample = exampleSample();
  const std::string text = hardwareSampleJson(sample);
  EXPECT_EQ(text.find('\n'), text.npos);
  const auto read = hardwareSampleFrom(text);
  ASSERT_TRUE(read);
  EXPECT_EQ(hardwareSampleJson(*read), text);
  EXPECT_EQ(read->gpus[0].name(), "GPU 3 (GPU-ab12cd34)");
  EXPECT_EQ(read->gpus[1].name(), "GPU 4");
  EXPECT_TRUE(read->gpus[1].gone);
  EXPECT_EQ(read->xids[0].count(), 2U) << "both sources report the same errors";
}

TEST(HardwareSample, IsNoneOfOtherText) {
  for (const char* text : {"", "{", "null", "[]", "{}", R"({"sample": 1})", R"({"sample": "x"})"}) {
    EXPECT_FALSE(hardwareSampleFrom(text)) << text;
  }
  EXPECT_FALSE(hardwareSampleFrom(std::string(kMaxSampleBytes + 1, ' ')));
  EXPECT_FALSE(hardwareSampleFrom(R"({"sample": "hardware", "gpus": )" + std::string(1000, '[') +
                                  std::string(1000, ']') + "}"));
}

TEST(HardwareSample, KeepsWhatIsKnownOfHostileText) {
  const auto sample = hardwareSampleFrom(R"({
      "sample": "hardware", "nvml": {"a": 1}, "took_sec": 1e300, "kernel_log": 1,
      "gpus": [7, {"index": -9, "uuid": "\u001b[31m\n\"x", "gone": "yes",
                   "counters": {"rm -rf": 1, "rx_errors": 2, "pcie_replays": -1,
                                "power_milliwatts": "many", "temperature_celsius": 40}}],
      "network": {"not": "a list"},
      "xids": [{"number": -5, "pid": -1, "pci": 3, "nvml": -1}]})");
  ASSERT_TRUE(sample);
  EXPECT_EQ(sample->nvml, "");
  EXPECT_EQ(sample->took_sec, 0);
  EXPECT_FALSE(sample->kernel_log);
  ASSERT_THAT(sample->gpus, SizeIs(1));
  EXPECT_EQ(sample->gpus[0].index, -1);
  EXPECT_EQ(sample->gpus[0].uuid, "?[31m?\"x");
  EXPECT_FALSE(sample->gpus[0].gone);
  EXPECT_EQ(sample->gpus[0].counters, (HardwareCounters{{"temperature_celsius", 40}}));
  EXPECT_THAT(sample->network, IsEmpty());
  ASSERT_THAT(sample->xids, SizeIs(1));
  EXPECT_EQ(sample->xids[0].number, 0);
  EXPECT_EQ(sample->xids[0].pid, 0);
  EXPECT_EQ(sample->xids[0].count(), 0U);
}

TEST(HardwareSample, IsBounded) {
  HardwareSample sample;
  sample.gpus.resize(kMaxGpus + 50);
  sample.network.resize(kMaxNetworkDevices + 50);
  sample.xids.resize(kMaxXids + 50);
  sample.nvml_text = std::string(5000, 'x');
  const auto read = hardwareSampleFrom(hardwareSampleJson(sample));
  ASSERT_TRUE(read);
  EXPECT_THAT(read->gpus, SizeIs(kMaxGpus));
  EXPECT_THAT(read->network, SizeIs(kMaxNetworkDevices));
  EXPECT_THAT(read->xids, SizeIs(kMaxXids));
  EXPECT_EQ(read->nvml_text.size(), 200U);
}

TEST(PciKey, IsEqualForTheSameDevice) {
  for (const char* text : {"PCI:0000:3b:00", "0000:3B:00.0", "00000000:3B:00.0", "3b:00.0"}) {
    EXPECT_EQ(pciKey(text), "0000:3b:00") << text;
  }
  EXPECT_EQ(pciKey("00010000:3b:00.0"), "10000:3b:00");
  for (const char* text : {"", "PCI:", "3b", "a:b:c:d", "0000:3b:00:1", "0000:3b:zz", "x:3b:00"}) {
    EXPECT_EQ(pciKey(text), "") << text;
  }
}

HangEvidence twoNodes() {
  HangEvidence evidence;
  evidence.nodes = 2;
  evidence.node = 0;
  evidence.hardware = {{0, false, "eth0: link went down once since the job began"}};
  HangEvidence other;
  other.node = 1;
  other.hardware = {{0, true, "GPU 3 fell off the bus"}};
  addNode(evidence, other, 0, 0);
  return evidence;
}

TEST(HardwareNotes, OfAnotherNodeAreGathered) {
  const HangEvidence evidence = twoNodes();
  EXPECT_THAT(hardwareSentences(evidence),
              ElementsAre("node 1: GPU 3 fell off the bus",
                          "node 0: eth0: link went down once since the job began"));
  EXPECT_TRUE(hardwareFailedOn(evidence, 1));
  EXPECT_FALSE(hardwareFailedOn(evidence, 0));
  const auto read = evidenceFromJson(evidenceJson(evidence));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->hardware, evidence.hardware);
}

TEST(HardwareNotes, AreBoundedAndPrintable) {
  HangEvidence evidence, other;
  other.hardware.resize(1000, {0, false, "\x1b[2J" + std::string(5000, 'x')});
  addNode(evidence, other, 0, 0);
  EXPECT_THAT(evidence.hardware, SizeIs(kMaxNotesOfNode));
  EXPECT_THAT(hardwareSentences(evidence), Each(SizeIs(240)));
  EXPECT_EQ(hardwareSentences(evidence)[0].find('\x1b'), std::string::npos);
}

TEST(HardwareNotes, OfADamagedReportAreLeftOut) {
  const auto notes = hardwareNotesFrom(nlohmann::json::parse(
      R"({"hardware": [1, "x", {"node": "a", "fatal": 1, "text": 5}, {"fatal": true}]})"));
  ASSERT_THAT(notes, SizeIs(2));
  EXPECT_EQ(notes[0], HardwareNote{});
  EXPECT_THAT(hardwareNotesFrom(nlohmann::json::object()), IsEmpty());
}

}  // namespace hardware_sample_test
}  // namespace reft
