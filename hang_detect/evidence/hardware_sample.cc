#include "hang_detect/evidence/hardware_sample.h"

#include <algorithm>
#include <cctype>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/json_fields.h"
#include "hang_detect/stacks/printable.h"
#include "intercept/base/json.h"

namespace reft {

namespace {

using nlohmann::json;

constexpr size_t kMaxName = 64;
constexpr size_t kMaxProblem = 200;

using CounterKind = HardwareCounter::Kind;
constexpr HardwareCounter kHardwareCounters[] = {
    {CounterKind::kGpu, "ecc_volatile_corrected", false,
     "Corrected ECC errors since the driver was loaded."},
    {CounterKind::kGpu, "ecc_volatile_uncorrected", false,
     "Uncorrectable ECC errors since the driver was loaded."},
    {CounterKind::kGpu, "ecc_aggregate_corrected", false,
     "Corrected ECC errors in the life of the GPU."},
    {CounterKind::kGpu, "ecc_aggregate_uncorrected", false,
     "Uncorrectable ECC errors in the life of the GPU."},
    {CounterKind::kGpu, "retired_pages", false, "Pages of memory that are retired."},
    {CounterKind::kGpu, "retirement_pending", true, "1: pages wait for a reset to be retired."},
    {CounterKind::kGpu, "remapped_rows_corrected", false,
     "Rows of memory that were replaced because of corrected errors."},
    {CounterKind::kGpu, "remapped_rows_uncorrected", false,
     "Rows of memory that were replaced because of uncorrectable errors."},
    {CounterKind::kGpu, "remapping_pending", true, "1: rows wait for a reset to be replaced."},
    {CounterKind::kGpu, "remapping_failed", true, "1: a row could not be replaced."},
    {CounterKind::kGpu, "throttle_reasons", true,
     "Why the clocks are lowered just now, as NVML's bits (nvmlClocksEventReasons)."},
    {CounterKind::kGpu, "temperature_celsius", true, "Temperature of the GPU."},
    {CounterKind::kGpu, "power_milliwatts", true, "Power that the GPU draws."},
    {CounterKind::kGpu, "nvlinks_active", true, "NVLinks that are up."},
    {CounterKind::kGpu, "nvlink_replays", false, "Replays of all NVLinks of the GPU."},
    {CounterKind::kGpu, "nvlink_recoveries", false, "Recoveries of all NVLinks of the GPU."},
    {CounterKind::kGpu, "nvlink_crc_errors", false, "CRC errors of all NVLinks of the GPU."},
    {CounterKind::kGpu, "pcie_replays", false, "Replays of the PCIe link."},

    {CounterKind::kNic, "rx_packets", false, "Packets received."},
    {CounterKind::kNic, "tx_packets", false, "Packets sent."},
    {CounterKind::kNic, "rx_errors", false, "Packets received with errors."},
    {CounterKind::kNic, "tx_errors", false, "Packets that could not be sent because of errors."},
    {CounterKind::kNic, "rx_dropped", false, "Packets received and dropped."},
    {CounterKind::kNic, "tx_dropped", false, "Packets dropped instead of being sent."},
    {CounterKind::kNic, "carrier_changes", false, "How often the link went down or came up."},
    {CounterKind::kNic, "carrier_down_count", false, "How often the link went down."},

    {CounterKind::kPort, "symbol_error", false, "Symbols received with errors."},
    {CounterKind::kPort, "link_error_recovery", false, "How often the link recovered from errors."},
    {CounterKind::kPort, "link_downed", false, "How often the link went down."},
    {CounterKind::kPort, "port_rcv_errors", false, "Packets received with errors."},
    {CounterKind::kPort, "port_rcv_remote_physical_errors", false,
     "Packets received that were marked bad on their way."},
    {CounterKind::kPort, "port_xmit_discards", false, "Packets dropped instead of being sent."},
    {CounterKind::kPort, "local_link_integrity_errors", false, "Errors of the local link."},
    {CounterKind::kPort, "excessive_buffer_overrun_errors", false, "Overruns of buffers."},
    {CounterKind::kPort, "out_of_sequence", false, "Packets that arrived out of order."},
    {CounterKind::kPort, "packet_seq_err", false, "Requests to send packets again."},
    {CounterKind::kPort, "local_ack_timeout_err", false,
     "Packets that no acknowledgement came for."},
    {CounterKind::kPort, "rx_icrc_encapsulated", false, "RoCE packets with a wrong checksum."},
};

bool isCounter(std::string_view name, bool gpu, bool port) {
  return std::ranges::any_of(kHardwareCounters, [&](const HardwareCounter& known) {
    return (known.kind == CounterKind::kGpu) == gpu && (known.kind == CounterKind::kPort) == port &&
           name == known.name;
  });
}

HardwareCounters countersFrom(const json& entry, bool gpu, bool port) {
  HardwareCounters counters;
  const auto found = entry.find("counters");
  if (found == entry.end() || !found->is_object()) {
    return counters;
  }
  for (const auto& [name, value] : found->items()) {
    if (isCounter(name, gpu, port) && value.is_number_unsigned()) {
      counters.emplace(name, value.get<uint64_t>());
    }
  }
  return counters;
}

std::string shortText(const json& entry, const char* key, size_t most = kMaxName) {
  return printable(json_fields::text(entry, key, most), most);
}

int positive(const json& entry, const char* key, int otherwise) {
  return std::max(otherwise, json_fields::number<int>(entry, key, otherwise));
}

}  // namespace

std::string GpuSample::name() const {
  constexpr size_t kShort = 12;  // "GPU-ab12cd34"
  return "GPU " + std::to_string(index) + (uuid.empty() ? "" : " (" + uuid.substr(0, kShort) + ")");
}

uint64_t XidSample::count() const {
  return std::max(from_nvml, from_kernel_log);
}

std::span<const HardwareCounter> hardwareCounters() {
  return kHardwareCounters;
}

std::string hardwareSampleJson(const HardwareSample& sample) {
  json gpus = json::array(), network = json::array(), xids = json::array();
  for (const GpuSample& gpu : sample.gpus) {
    gpus.push_back({{"index", gpu.index},
                    {"uuid", gpu.uuid},
                    {"pci", gpu.pci},
                    {"gone", gpu.gone},
                    {"needs_reset", gpu.needs_reset},
                    {"counters", gpu.counters}});
  }
  for (const NetworkSample& device : sample.network) {
    network.push_back({{"device", device.device},
                       {"infiniband", device.infiniband},
                       {"state", device.state},
                       {"counters", device.counters}});
  }
  for (const XidSample& xid : sample.xids) {
    xids.push_back({{"number", xid.number},
                    {"pci", xid.pci},
                    {"pid", xid.pid},
                    {"nvml", xid.from_nvml},
                    {"kernel_log", xid.from_kernel_log}});
  }
  return json{{"sample", "hardware"},          {"nvml", sample.nvml},
              {"nvml_text", sample.nvml_text}, {"kernel_log", sample.kernel_log},
              {"took_sec", sample.took_sec},   {"gpus", std::move(gpus)},
              {"network", std::move(network)}, {"xids", std::move(xids)}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

std::optional<HardwareSample> hardwareSampleFrom(std::string_view text) {
  const json read = parseJson(text, kMaxSampleBytes);
  if (!read.is_object() || json_fields::text(read, "sample") != "hardware") {
    return std::nullopt;
  }
  HardwareSample sample;
  sample.nvml = shortText(read, "nvml");
  sample.nvml_text = shortText(read, "nvml_text", kMaxProblem);
  sample.kernel_log = json_fields::flag(read, "kernel_log");
  const double took_sec = json_fields::number<double>(read, "took_sec", 0);
  sample.took_sec = took_sec > 0 && took_sec < 1e6 ? took_sec : 0;
  json_fields::each(read, "gpus", [&](const json& entry) {
    if (sample.gpus.size() < kMaxGpus) {
      GpuSample& gpu = sample.gpus.emplace_back();
      gpu.index = positive(entry, "index", -1);
      gpu.uuid = shortText(entry, "uuid");
      gpu.pci = shortText(entry, "pci");
      gpu.gone = json_fields::flag(entry, "gone");
      gpu.needs_reset = json_fields::flag(entry, "needs_reset");
      gpu.counters = countersFrom(entry, true, false);
    }
  });
  json_fields::each(read, "network", [&](const json& entry) {
    if (sample.network.size() < kMaxNetworkDevices) {
      NetworkSample& device = sample.network.emplace_back();
      device.device = shortText(entry, "device");
      device.infiniband = json_fields::flag(entry, "infiniband");
      device.state = shortText(entry, "state");
      device.counters = countersFrom(entry, false, device.infiniband);
    }
  });
  json_fields::each(read, "xids", [&](const json& entry) {
    if (sample.xids.size() < kMaxXids) {
      XidSample& xid = sample.xids.emplace_back();
      xid.number = positive(entry, "number", 0);
      xid.pci = shortText(entry, "pci");
      xid.pid = positive(entry, "pid", 0);
      xid.from_nvml = json_fields::number<uint64_t>(entry, "nvml", 0);
      xid.from_kernel_log = json_fields::number<uint64_t>(entry, "kernel_log", 0);
    }
  });
  return sample;
}

std::string pciKey(std::string_view text) {
  constexpr std::string_view kPrefix = "PCI:";
  if (text.starts_with(kPrefix)) {
    text.remove_prefix(kPrefix.size());
  }
  text = text.substr(0, text.find('.'));
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else if (std::isxdigit(static_cast<unsigned char>(c)) != 0) {
      parts.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else {
      return "";
    }
  }
  if (parts.size() == 2) {
    parts.insert(parts.begin(), "0000");  // without a domain
  }
  if (parts.size() != 3) {
    return "";
  }
  std::string& domain = parts[0];
  while (domain.size() > 4 && domain[0] == '0') {
    domain.erase(0, 1);
  }
  if (domain.size() < 4 || domain.size() > 8 || parts[1].size() != 2 || parts[2].size() != 2) {
    return "";
  }
  return domain + ":" + parts[1] + ":" + parts[2];
}

}  // namespace reft
