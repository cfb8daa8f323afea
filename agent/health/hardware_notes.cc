#include "agent/health/hardware_notes.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

namespace reft::agent {

namespace {

// 48: double-bit ECC error. 62: the GPU's microcontroller halted. 64: a row or page with errors
// could not be replaced. 74: NVLink. 79: fell off the bus. 94, 95: ECC errors, contained or not.
// 119, 120: the GPU's system processor does not answer, or failed. 140: unrecovered ECC error.
constexpr int kHardwareXids[] = {48, 62, 64, 74, 79, 94, 95, 119, 120, 140};
// 13: exception of a kernel. 31: access to memory that is not mapped. 43: a channel stopped. 45:
// channels were removed, mostly because the process ended.
constexpr int kProgramXids[] = {13, 31, 43, 45};
constexpr int kOffTheBus = 79;

// Counters of which so many more are worth a note. Its text: device, number, words.
struct Threshold {
  HardwareCounter::Kind kind;
  std::string_view counter;
  uint64_t least;
  std::string_view one, many;
};
using Kind = HardwareCounter::Kind;
constexpr Threshold kThresholds[] = {
    {Kind::kGpu, "ecc_volatile_corrected", 1000, "corrected ECC error", "corrected ECC errors"},
    {Kind::kGpu, "remapped_rows_uncorrected", 1, "row of memory replaced",
     "rows of memory replaced"},
    {Kind::kGpu, "nvlink_recoveries", 5, "NVLink recovery", "NVLink recoveries"},
    {Kind::kGpu, "nvlink_replays", 1000, "NVLink replay", "NVLink replays"},
    {Kind::kGpu, "nvlink_crc_errors", 1000, "NVLink CRC error", "NVLink CRC errors"},
    {Kind::kGpu, "pcie_replays", 1000, "PCIe replay", "PCIe replays"},
    {Kind::kNic, "rx_errors", 100, "receive error", "receive errors"},
    {Kind::kNic, "tx_errors", 100, "send error", "send errors"},
    {Kind::kPort, "symbol_error", 1000, "symbol error", "symbol errors"},
    {Kind::kPort, "link_error_recovery", 2, "link recovery", "link recoveries"},
    {Kind::kPort, "port_rcv_errors", 100, "receive error", "receive errors"},
    {Kind::kPort, "port_rcv_remote_physical_errors", 100, "packet marked bad on its way",
     "packets marked bad on their way"},
    {Kind::kPort, "port_xmit_discards", 10'000, "packet discarded", "packets discarded"},
    {Kind::kPort, "local_link_integrity_errors", 10, "link integrity error",
     "link integrity errors"},
    {Kind::kPort, "excessive_buffer_overrun_errors", 10, "buffer overrun", "buffer overruns"},
    {Kind::kPort, "local_ack_timeout_err", 100, "missing acknowledgement",
     "missing acknowledgements"},
    {Kind::kPort, "packet_seq_err", 10'000, "request to send again", "requests to send again"},
    {Kind::kPort, "rx_icrc_encapsulated", 100, "packet with a wrong checksum",
     "packets with a wrong checksum"},
};
// Packets are dropped on healthy devices, too: only many, and a share of all, count.
constexpr uint64_t kLeastDropped = 10'000;
constexpr uint64_t kPacketsPerDrop = 1000;

// Bits of throttle_reasons. Idle clocks, the power limit and chosen clocks are normal.
constexpr struct {
  uint64_t bit;
  std::string_view name;
} kThrottling[] = {{0x08, "hardware slowdown"},
                   {0x20, "software thermal slowdown"},
                   {0x40, "hardware thermal slowdown"},
                   {0x80, "power brake"}};

constexpr std::string_view kSince = " since the job began";

std::string counted(uint64_t number) {  // "4,120"
  std::string text = std::to_string(number);
  for (size_t at = text.size(); at > 3; at -= 3) {
    text.insert(at - 3, 1, ',');
  }
  return text;
}

std::string times(uint64_t number) {
  return number == 1 ? "once" : number == 2 ? "twice" : counted(number) + " times";
}

uint64_t valueOf(const HardwareCounters& counters, std::string_view name) {
  const auto found = counters.find(name);
  return found == counters.end() ? 0 : found->second;
}

// What a counter has grown by; one that was reset began at 0 again. 0 if either is unknown.
uint64_t grown(const HardwareCounters& before, const HardwareCounters& now, std::string_view name) {
  const auto then = before.find(name);
  const auto value = now.find(name);
  if (then == before.end() || value == now.end()) {
    return 0;
  }
  return value->second >= then->second ? value->second - then->second : value->second;
}

template <typename Device, typename Same>
const Device* findIn(const std::vector<Device>& devices, Same same) {
  const auto found = std::ranges::find_if(devices, same);
  return found == devices.end() ? nullptr : &*found;
}

const GpuSample* sameGpu(const HardwareSample& sample, const GpuSample& gpu) {
  return findIn(sample.gpus, [&](const GpuSample& other) {
    return gpu.uuid.empty() || other.uuid.empty() ? gpu.index == other.index
                                                  : gpu.uuid == other.uuid;
  });
}

const NetworkSample* sameDevice(const HardwareSample& sample, const NetworkSample& device) {
  return findIn(sample.network, [&](const NetworkSample& other) {
    return device.device == other.device && device.infiniband == other.infiniband;
  });
}

uint64_t xidsIn(const HardwareSample& sample, const XidSample& xid) {
  const XidSample* same = findIn(sample.xids, [&](const XidSample& other) {
    return other.number == xid.number && other.pci == xid.pci;
  });
  return same == nullptr ? 0 : same->count();
}

uint64_t uncorrectableEcc(const GpuSample& before, const GpuSample& now) {
  // A reset of the GPU clears the one; some GPUs lack the other.
  return std::max(grown(before.counters, now.counters, "ecc_volatile_uncorrected"),
                  grown(before.counters, now.counters, "ecc_aggregate_uncorrected"));
}

class Notes {
 public:
  Notes(const HardwareHistory& history, int node) : history_(history), node_(node) {}

  std::vector<HardwareNote> make() {
    if (history_.newest.nvml == "silent") {
      add("NVML does not answer: " + history_.newest.nvml_text);
    }
    for (const GpuSample& gpu : history_.newest.gpus) {
      addGpu(gpu);
    }
    if (history_.newest.nvml == "ok") {
      for (const GpuSample& gpu : history_.first.gpus) {
        if (sameGpu(history_.newest, gpu) == nullptr) {
          add(gpu.name() + " is no longer there", !gpu.gone);
        }
      }
    }
    for (const XidSample& xid : history_.newest.xids) {
      addXidNote(xid);
    }
    for (const NetworkSample& device : history_.newest.network) {
      addNetwork(device);
    }
    // Not of std::ranges: clang 14 cannot read what that returns in libstdc++ 12.
    std::stable_partition(notes_.begin(), notes_.end(),
                          [](const HardwareNote& note) { return note.fatal; });
    if (notes_.size() > kMaxNotesOfNode) {
      const size_t more = notes_.size() - (kMaxNotesOfNode - 1);
      notes_.resize(kMaxNotesOfNode - 1);
      add(std::to_string(more) + " more notes on the hardware of this node");
    }
    return std::move(notes_);
  }

 private:
  void add(std::string text, bool fatal = false) {
    notes_.push_back({node_, fatal, std::move(text)});
  }

  void addGrown(Kind kind, const std::string& name, const HardwareCounters& before,
                const HardwareCounters& now) {
    for (const Threshold& threshold : kThresholds) {
      const uint64_t more =
          threshold.kind == kind ? grown(before, now, threshold.counter) : uint64_t{0};
      if (more > 0 && more >= threshold.least) {
        add(name + ": " + counted(more) + " " +
            std::string(more == 1 ? threshold.one : threshold.many) + std::string(kSince));
      }
    }
  }

  void addGpu(const GpuSample& gpu) {
    const GpuSample* const first = sameGpu(history_.first, gpu);
    if (first == nullptr) {
      return;
    }
    if (gpu.gone) {
      const bool before = first->gone;
      const std::string name = gpu.uuid.empty() ? first->name() : gpu.name();
      const XidSample fallen{kOffTheBus, pciKey(gpu.pci.empty() ? first->pci : gpu.pci)};
      add(before ? name + " was lost before the job began"
                 : name + " fell off the bus" +
                       (xidsIn(history_.newest, fallen) > 0 ? " (Xid 79)" : ""),
          !before);
      return;
    }
    if (gpu.counters.empty() && !first->counters.empty()) {
      add(gpu.name() + ": NVML can read none of its counters any more");
      return;
    }
    if (const uint64_t errors = uncorrectableEcc(*first, gpu); errors > 0) {
      const GpuSample* const attempt = sameGpu(history_.attempt, gpu);
      add(gpu.name() + ": " + counted(errors) + " uncorrectable ECC error" +
              (errors == 1 ? "" : "s") + std::string(kSince),
          attempt != nullptr && uncorrectableEcc(*attempt, gpu) > 0);
    }
    if (gpu.needs_reset) {
      add(gpu.name() + " needs a reset");
    }
    addNew(*first, gpu, "remapping_failed", "a row of its memory could not be replaced");
    addNew(*first, gpu, "remapping_pending",
           "a row of its memory waits for a reset to be replaced");
    addNew(*first, gpu, "retirement_pending",
           "a page of its memory waits for a reset to be retired");
    addThrottling(gpu);
    const uint64_t links = valueOf(first->counters, "nvlinks_active");
    const uint64_t left = valueOf(gpu.counters, "nvlinks_active");
    if (left < links && gpu.counters.contains("nvlinks_active")) {
      add(gpu.name() + ": " + counted(links - left) + " of " + counted(links) +
          " NVLinks went down");
    }
    addGrown(Kind::kGpu, gpu.name(), first->counters, gpu.counters);
  }

  void addNew(const GpuSample& before, const GpuSample& gpu, std::string_view flag,
              const std::string& text) {
    if (valueOf(before.counters, flag) == 0 && valueOf(gpu.counters, flag) != 0) {
      add(gpu.name() + ": " + text);
    }
  }

  void addThrottling(const GpuSample& gpu) {
    const uint64_t bits = valueOf(gpu.counters, "throttle_reasons");
    std::string why;
    for (const auto& reason : kThrottling) {
      if ((bits & reason.bit) != 0) {
        why += (why.empty() ? "" : ", ") + std::string(reason.name);
      }
    }
    if (!why.empty()) {
      add(gpu.name() + " is throttled: " + why);
    }
  }

  void addXidNote(const XidSample& xid) {
    const GpuSample* const gpu = findIn(history_.newest.gpus, [&](const GpuSample& known) {
      return !xid.pci.empty() && pciKey(known.pci) == xid.pci;
    });
    if (xid.number == kOffTheBus && gpu != nullptr && gpu->gone) {
      return;  // the note on the GPU has it
    }
    // Of a GPU that is not visible to this job, another job's.
    const bool visible = gpu != nullptr || xid.pci.empty() || history_.newest.gpus.empty();
    const XidKind kind = xidKind(xid.number);
    std::string text =
        (gpu != nullptr ? gpu->name() : "GPU at " + (xid.pci.empty() ? "?" : xid.pci)) + ": Xid " +
        std::to_string(xid.number) + (xid.count() == 1 ? "" : " " + times(xid.count())) +
        std::string(kSince);
    text += kind == XidKind::kProgram    ? ", mostly an error of the program"
            : kind == XidKind::kHardware ? ", an error of the hardware"
                                         : "";
    if (xid.pid > 0) {
      text += " (process " + std::to_string(xid.pid) + ")";
    }
    const bool now = xid.count() > xidsIn(history_.attempt, xid);
    add(std::move(text), kind == XidKind::kHardware && now && visible);
  }

  void addNetwork(const NetworkSample& device) {
    const NetworkSample* const first = sameDevice(history_.first, device);
    if (first == nullptr) {
      return;
    }
    const std::string& name = device.device;
    const HardwareCounters& before = first->counters;
    const HardwareCounters& now = device.counters;
    const uint64_t changes = grown(before, now, "carrier_changes");
    const uint64_t downs = device.infiniband ? grown(before, now, "link_downed")
                           : now.contains("carrier_down_count")
                               ? grown(before, now, "carrier_down_count")
                               : (changes + 1) / 2;
    if (downs > 0) {
      add(name + ": link went down " + times(downs) + std::string(kSince));
    }
    const std::string_view up = device.infiniband ? "active" : "up";
    if (first->state == up && device.state != up && !device.state.empty()) {
      add(name + ": link is " + device.state);
    }
    addGrown(device.infiniband ? Kind::kPort : Kind::kNic, name, before, now);
    addDropped(name, before, now, "rx_dropped", "rx_packets", " received packets dropped");
    addDropped(name, before, now, "tx_dropped", "tx_packets", " packets dropped before sending");
  }

  void addDropped(const std::string& name, const HardwareCounters& before,
                  const HardwareCounters& now, std::string_view counter, std::string_view packets,
                  const std::string& words) {
    const uint64_t dropped = grown(before, now, counter);
    if (dropped >= kLeastDropped && dropped >= grown(before, now, packets) / kPacketsPerDrop) {
      add(name + ": " + counted(dropped) + words + std::string(kSince));
    }
  }

  const HardwareHistory& history_;
  int node_;
  std::vector<HardwareNote> notes_;
};

}  // namespace

XidKind xidKind(int number) {
  return std::ranges::find(kHardwareXids, number) != std::end(kHardwareXids) ? XidKind::kHardware
         : std::ranges::find(kProgramXids, number) != std::end(kProgramXids) ? XidKind::kProgram
                                                                             : XidKind::kOther;
}

std::vector<HardwareNote> hardwareNotes(const HardwareHistory& history, int node) {
  return Notes(history, node).make();
}

}  // namespace reft::agent
