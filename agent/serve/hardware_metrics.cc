#include "agent/serve/hardware_metrics.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace reft::agent {

namespace {

using CounterKind = HardwareCounter::Kind;

std::string quoted(const std::string& value) {
  std::string result = "\"";
  for (const char c : value) {
    result += c == '\\' || c == '"' ? "\\" : "";
    result += c;
  }
  return result + "\"";
}

std::string labelOf(const GpuSample& gpu) {
  return gpu.uuid.empty() ? std::to_string(gpu.index) : gpu.uuid;
}

}  // namespace

std::string hardwareMetrics(const HardwareSample& sample, const std::string& labels) {
  std::ostringstream out;
  const auto series = [&](const std::string& name, bool gauge, const std::string& help,
                          const std::vector<std::pair<std::string, uint64_t>>& values) {
    if (values.empty()) {
      return;
    }
    out << "# HELP " << name << ' ' << help << "\n# TYPE " << name << ' '
        << (gauge ? "gauge" : "counter") << '\n';
    for (const auto& [label, value] : values) {
      out << name << '{' << labels << ',' << label << "} " << value << '\n';
    }
  };
  // Of GPUs that NVML has not answered for, nothing is known now.
  const std::vector<GpuSample> none;
  const std::vector<GpuSample>& gpus = sample.nvml == "ok" ? sample.gpus : none;
  for (const HardwareCounter& counter : hardwareCounters()) {
    std::vector<std::pair<std::string, uint64_t>> values;
    const auto keep = [&](const std::string& label, const HardwareCounters& counters) {
      if (const auto found = counters.find(counter.name); found != counters.end()) {
        values.emplace_back(label, found->second);
      }
    };
    for (const GpuSample& gpu : gpus) {
      if (counter.kind == CounterKind::kGpu) {
        keep("gpu=" + quoted(labelOf(gpu)), gpu.counters);
      }
    }
    for (const NetworkSample& device : sample.network) {
      if (counter.kind == (device.infiniband ? CounterKind::kPort : CounterKind::kNic)) {
        keep("device=" + quoted(device.device), device.counters);
      }
    }
    const char* const kind = counter.kind == CounterKind::kGpu   ? "gpu_"
                             : counter.kind == CounterKind::kNic ? "nic_"
                                                                 : "port_";
    series(std::string("reft_agent_") + kind + counter.name + (counter.gauge ? "" : "_total"),
           counter.gauge, counter.help, values);
  }
  std::vector<std::pair<std::string, uint64_t>> lost, xids;
  for (const GpuSample& gpu : gpus) {
    lost.emplace_back("gpu=" + quoted(labelOf(gpu)), gpu.gone ? 1 : 0);
  }
  series("reft_agent_gpu_lost", true, "1: the GPU has fallen off the bus.", lost);
  for (const XidSample& xid : sample.xids) {
    const auto gpu = std::ranges::find_if(sample.gpus, [&](const GpuSample& known) {
      return !xid.pci.empty() && pciKey(known.pci) == xid.pci;
    });
    xids.emplace_back("gpu=" + quoted(gpu == sample.gpus.end() ? xid.pci : labelOf(*gpu)) +
                          ",xid=\"" + std::to_string(xid.number) + "\"",
                      xid.count());
  }
  series("reft_agent_gpu_xid_errors_total", false, "Xid errors of the driver since the job began.",
         xids);
  if (sample.nvml == "ok" || sample.nvml == "silent") {
    out << "# HELP reft_agent_nvml_answers 1: NVML answers. 0: a call does not return.\n# TYPE "
           "reft_agent_nvml_answers gauge\nreft_agent_nvml_answers{"
        << labels << "} " << (sample.nvml == "ok" ? 1 : 0) << '\n';
  }
  return out.str();
}

}  // namespace reft::agent
