#include "agent/serve/hardware_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft::agent {
namespace hardware_metrics_test {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(HardwareMetrics, HaveTheCountersThatExist) {
  HardwareSample sample;
  sample.nvml = "ok";
  sample.gpus = {{0,
                  "GPU-1",
                  "00000000:3b:00.0",
                  false,
                  false,
                  {{"ecc_volatile_uncorrected", 2}, {"temperature_celsius", 61}}},
                 {1, "", "", true}};
  sample.network = {{"eth\"0", false, "up", {{"rx_errors", 5}}},
                    {"mlx5_0 port 1", true, "active", {{"link_downed", 3}}}};
  sample.xids = {{31, "0000:3b:00", 0, 4, 3}, {79, "0000:3c:00", 0, 0, 1}};
  const std::string text = hardwareMetrics(sample, "job=\"j\",node=\"0\"");
  for (const char* line : {
           "# TYPE reft_agent_gpu_ecc_volatile_uncorrected_total counter\n"
           "reft_agent_gpu_ecc_volatile_uncorrected_total{job=\"j\",node=\"0\",gpu=\"GPU-1\"} 2\n",
           "# TYPE reft_agent_gpu_temperature_celsius gauge\n",
           "reft_agent_gpu_lost{job=\"j\",node=\"0\",gpu=\"GPU-1\"} 0\n"
           "reft_agent_gpu_lost{job=\"j\",node=\"0\",gpu=\"1\"} 1\n",
           "reft_agent_nic_rx_errors_total{job=\"j\",node=\"0\",device=\"eth\\\"0\"} 5\n",
           "reft_agent_port_link_downed_total{job=\"j\",node=\"0\",device=\"mlx5_0 port 1\"} 3\n",
           "reft_agent_gpu_xid_errors_total{job=\"j\",node=\"0\",gpu=\"GPU-1\",xid=\"31\"} 4\n",
           "reft_agent_gpu_xid_errors_total{job=\"j\",node=\"0\",gpu=\"0000:3c:00\",xid=\"79\"} "
           "1\n",
           "reft_agent_nvml_answers{job=\"j\",node=\"0\"} 1\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(text, Not(HasSubstr("power")));
  EXPECT_THAT(text, Not(HasSubstr("tx_errors")));
}

TEST(HardwareMetrics, AreEmptyWithoutHardware) {
  EXPECT_EQ(hardwareMetrics({}, "job=\"j\""), "");
}

TEST(HardwareMetrics, DoNotRepeatWhatAGpuSaidBeforeNvmlFellSilent) {
  HardwareSample sample;
  sample.nvml = "silent";
  sample.gpus = {{0, "GPU-1", "", false, false, {{"temperature_celsius", 61}}}};
  const std::string text = hardwareMetrics(sample, "job=\"j\"");
  EXPECT_THAT(text, Not(HasSubstr("temperature")));
  EXPECT_THAT(text, HasSubstr("reft_agent_nvml_answers{job=\"j\"} 0\n"));
}

}  // namespace hardware_metrics_test
}  // namespace reft::agent
