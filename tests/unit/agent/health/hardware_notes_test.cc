#include "agent/health/hardware_notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft::agent {
namespace hardware_notes_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

GpuSample gpuOf(int index) {
  GpuSample gpu;
  gpu.index = index;
  gpu.uuid = "GPU-ab12cd3" + std::to_string(index) + "-0000";
  gpu.pci = "00000000:3" + std::to_string(index) + ":00.0";
  for (const HardwareCounter& counter : hardwareCounters()) {
    if (counter.kind == HardwareCounter::Kind::kGpu) {
      gpu.counters[counter.name] = 0;
    }
  }
  gpu.counters["nvlinks_active"] = 18;
  return gpu;
}

NetworkSample deviceOf(const std::string& name, bool infiniband) {
  NetworkSample device{name, infiniband, infiniband ? "active" : "up"};
  const auto kind = infiniband ? HardwareCounter::Kind::kPort : HardwareCounter::Kind::kNic;
  for (const HardwareCounter& counter : hardwareCounters()) {
    if (counter.kind == kind) {
      device.counters[counter.name] = 1000;
    }
  }
  return device;
}

// A node of two GPUs, a network card and a port. Tests change the newest sample.
class HardwareNotes : public ::testing::Test {
 protected:
  HardwareNotes() {
    HardwareSample sample;
    sample.nvml = "ok";
    sample.gpus = {gpuOf(0), gpuOf(1)};
    sample.network = {deviceOf("eth0", false), deviceOf("mlx5_0 port 1", true)};
    history = {sample, sample, sample};
  }

  uint64_t& gpu(const std::string& counter) { return history.newest.gpus[1].counters[counter]; }
  uint64_t& nic(const std::string& counter) { return history.newest.network[0].counters[counter]; }
  uint64_t& port(const std::string& counter) { return history.newest.network[1].counters[counter]; }

  std::vector<std::string> notes(bool fatal = false) const {
    std::vector<std::string> texts;
    for (const HardwareNote& note : hardwareNotes(history, 2)) {
      EXPECT_EQ(note.node, 2);
      EXPECT_EQ(note.fatal, fatal) << note.text;
      texts.push_back(note.text);
    }
    return texts;
  }

  HardwareHistory history;
};

TEST_F(HardwareNotes, AreSilentOnHealthyHardware) {
  EXPECT_THAT(notes(), IsEmpty());
  EXPECT_THAT(hardwareNotes({}, 0), IsEmpty());
}

TEST_F(HardwareNotes, AreSilentOnWhatHealthyDevicesDo) {
  gpu("ecc_volatile_corrected") = 12;
  gpu("ecc_aggregate_corrected") = 12;
  gpu("pcie_replays") = 3;
  gpu("throttle_reasons") = 0x1 | 0x2 | 0x4 | 0x10 | 0x100;  // idle, chosen, power limit
  gpu("temperature_celsius") = 84;
  gpu("power_milliwatts") = 700'000;
  gpu("nvlink_recoveries") = 4;
  nic("rx_dropped") += 9'999;
  nic("rx_errors") += 99;
  nic("rx_packets") += 1'000'000'000;
  port("symbol_error") += 999;
  port("link_error_recovery") += 1;
  port("out_of_sequence") += 1'000'000;
  EXPECT_THAT(notes(), IsEmpty());
  nic("rx_dropped") += 500'000;  // of a thousand million
  EXPECT_THAT(notes(), IsEmpty());
}

TEST_F(HardwareNotes, NameUncorrectableEccErrorsSinceTheJobBegan) {
  gpu("ecc_volatile_uncorrected") = 2;
  EXPECT_THAT(notes(true),
              ElementsAre("GPU 1 (GPU-ab12cd31): 2 uncorrectable ECC errors since the job began"));
  gpu("ecc_volatile_uncorrected") = 1;
  EXPECT_THAT(notes(true), ElementsAre(HasSubstr("1 uncorrectable ECC error since")));
}

TEST_F(HardwareNotes, AreFatalOnlyForThisAttempt) {
  gpu("ecc_volatile_uncorrected") = 2;
  history.attempt.gpus[1].counters["ecc_volatile_uncorrected"] = 2;
  history.newest.xids = {{48, "0000:31:00", 0, 1, 1}};
  history.attempt.xids = history.newest.xids;
  EXPECT_EQ(notes(false).size(), 2U);
}

TEST_F(HardwareNotes, TakeACounterThatWasResetForWhatItHasNow) {
  history.first.gpus[1].counters["ecc_volatile_uncorrected"] = 7;
  history.attempt = history.first;
  EXPECT_THAT(notes(), IsEmpty());
  gpu("ecc_volatile_uncorrected") = 1;
  EXPECT_THAT(notes(true), ElementsAre(HasSubstr(": 1 uncorrectable")));
}

TEST_F(HardwareNotes, TakeTheOtherEccCounterWhereAGpuLacksOne) {
  for (HardwareSample* sample : {&history.first, &history.attempt, &history.newest}) {
    sample->gpus[1].counters.erase("ecc_volatile_uncorrected");
  }
  gpu("ecc_aggregate_uncorrected") = 3;
  EXPECT_THAT(notes(true), ElementsAre(HasSubstr(": 3 uncorrectable")));
}

TEST_F(HardwareNotes, NameALostGpu) {
  history.newest.gpus[1].gone = true;
  history.newest.gpus[1].counters.clear();
  EXPECT_THAT(notes(true), ElementsAre("GPU 1 (GPU-ab12cd31) fell off the bus"));
  history.newest.xids = {{79, "0000:31:00", 0, 1, 0}};
  EXPECT_THAT(notes(true), ElementsAre("GPU 1 (GPU-ab12cd31) fell off the bus (Xid 79)"));
}

TEST_F(HardwareNotes, NameALostGpuThatGivesNoNameAnyMore) {
  history.newest.gpus[1] = {1, "", "", true};
  EXPECT_THAT(notes(true), ElementsAre("GPU 1 (GPU-ab12cd31) fell off the bus"));
}

TEST_F(HardwareNotes, NameAGpuThatGivesOnlyErrors) {
  history.newest.gpus[1].counters.clear();
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("NVML can read none of its counters any more")));
  history.first.gpus[1].counters.clear();  // it never did
  EXPECT_THAT(notes(), IsEmpty());
}

TEST_F(HardwareNotes, NameAGpuThatIsNoLongerListed) {
  history.newest.gpus.pop_back();
  EXPECT_THAT(notes(true), ElementsAre("GPU 1 (GPU-ab12cd31) is no longer there"));
  history.newest.nvml = "starting";  // it has listed none yet
  EXPECT_THAT(notes(), IsEmpty());
}

TEST_F(HardwareNotes, DoNotBlameTheJobsTimeForAGpuThatWasLostBefore) {
  history.first.gpus[1].gone = true;
  history.newest.gpus[1].gone = true;
  EXPECT_THAT(notes(false), ElementsAre(HasSubstr("lost before the job began")));
}

TEST_F(HardwareNotes, TellXidsOfTheHardwareFromThoseOfTheProgram) {
  for (const int number : {48, 62, 64, 74, 79, 94, 95, 119, 120, 140}) {
    EXPECT_EQ(xidKind(number), XidKind::kHardware) << number;
  }
  for (const int number : {13, 31, 43, 45}) {
    EXPECT_EQ(xidKind(number), XidKind::kProgram) << number;
  }
  EXPECT_EQ(xidKind(63), XidKind::kOther) << "a row was replaced, as it should be";
  history.newest.xids = {{31, "0000:31:00", 4711, 1, 1}, {63, "0000:30:00", 0, 2, 0}};
  EXPECT_THAT(
      notes(false),
      ElementsAre("GPU 1 (GPU-ab12cd31): Xid 31 since the job began, mostly an error of the "
                  "program (process 4711)",
                  "GPU 0 (GPU-ab12cd30): Xid 63 twice since the job began"));
  history.newest.xids = {{95, "0000:31:00", 0, 1, 3}};
  EXPECT_THAT(notes(true), ElementsAre(HasSubstr("Xid 95 3 times since the job began, an error of "
                                                 "the hardware")));
}

TEST_F(HardwareNotes, AreNotFatalForAGpuOfAnotherJob) {
  history.newest.xids = {{48, "0000:99:00", 0, 0, 1}};
  EXPECT_THAT(notes(false), ElementsAre(HasSubstr("GPU at 0000:99:00: Xid 48")));
}

TEST_F(HardwareNotes, NameWhatThrottlesAGpu) {
  gpu("throttle_reasons") = 0x4 | 0x8 | 0x80;
  EXPECT_THAT(notes(), ElementsAre("GPU 1 (GPU-ab12cd31) is throttled: hardware slowdown, power "
                                   "brake"));
}

TEST_F(HardwareNotes, NameMemoryAndLinksOfAGpu) {
  gpu("remapping_failed") = 1;
  gpu("remapping_pending") = 1;
  gpu("nvlinks_active") = 16;
  gpu("nvlink_recoveries") = 5;
  history.newest.gpus[1].needs_reset = true;
  EXPECT_THAT(notes(),
              ElementsAre(HasSubstr("needs a reset"), HasSubstr("could not be replaced"),
                          HasSubstr("waits for a reset"), HasSubstr("2 of 18 NVLinks went down"),
                          HasSubstr("5 NVLink recoveries since")));
}

TEST_F(HardwareNotes, NameErrorsOfTheNetwork) {
  nic("rx_errors") += 4120;
  nic("carrier_down_count") += 2;
  nic("carrier_changes") += 4;
  nic("tx_dropped") += 20'000;
  nic("tx_packets") += 1'000'000;
  port("link_downed") += 1;
  history.newest.network[1].state = "down";
  EXPECT_THAT(notes(),
              ElementsAre("eth0: link went down twice since the job began",
                          "eth0: 4,120 receive errors since the job began",
                          "eth0: 20,000 packets dropped before sending since the job began",
                          "mlx5_0 port 1: link went down once since the job began",
                          "mlx5_0 port 1: link is down"));
}

TEST_F(HardwareNotes, SayThatNvmlDoesNotAnswer) {
  history.newest.nvml = "silent";
  history.newest.nvml_text = "nvmlDeviceGetTemperature of GPU 1 has not returned for 4 s";
  EXPECT_THAT(notes(),
              ElementsAre("NVML does not answer: nvmlDeviceGetTemperature of GPU 1 has not "
                          "returned for 4 s"));
}

TEST_F(HardwareNotes, PutWhatIsFatalFirstAndAreFew) {
  for (int i = 0; i < 60; ++i) {
    NetworkSample device = deviceOf("eth" + std::to_string(i + 1), false);
    history.first.network.push_back(device);
    device.counters["rx_errors"] += 5000;
    history.newest.network.push_back(device);
  }
  history.newest.gpus[1].gone = true;
  const auto all = hardwareNotes(history, 0);
  ASSERT_EQ(all.size(), kMaxNotesOfNode);
  EXPECT_TRUE(all.front().fatal);
  EXPECT_EQ(all.back().text, "30 more notes on the hardware of this node");
}

}  // namespace hardware_notes_test
}  // namespace reft::agent
