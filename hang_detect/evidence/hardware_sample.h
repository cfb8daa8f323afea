// What the hardware of a node counts at one time: its GPUs (NVML), its network devices (/sys) and
// the Xid errors of its NVIDIA driver. reft-health writes a sample, the agent reads it.
//
// Threads: values; the functions are re-entrant.
// Errors:  none. hardwareSampleFrom() takes any text: it keeps what is known, within limits, and
//          every text that it keeps is printable ASCII.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

// Counters by name. A counter that cannot be read is absent.
using HardwareCounters = std::map<std::string, uint64_t, std::less<>>;

struct GpuSample {
  int index = -1;
  std::string uuid;   // "" if the GPU did not even give that
  std::string pci;    // "00000000:3b:00.0"
  bool gone = false;  // NVML_ERROR_GPU_IS_LOST
  bool needs_reset = false;
  HardwareCounters counters{};

  std::string name() const;  // "GPU 3 (GPU-ab12cd34)"
};

struct NetworkSample {
  std::string device;  // "eth0", "mlx5_0 port 1"
  bool infiniband = false;
  std::string state{};  // "up", "down", "active", ...; "" if unknown
  HardwareCounters counters{};
};

// How often the driver reported an Xid of one kind.
struct XidSample {
  int number = 0;
  std::string pci{};  // "" if the device is unknown
  int pid = 0;        // of the process that the kernel log names in the newest one; 0: none
  uint64_t from_nvml = 0, from_kernel_log = 0;

  uint64_t count() const;  // both report the same errors
};

struct HardwareSample {
  // "ok"; "absent": this machine has no NVML, or no NVIDIA GPU; "starting"; "silent": a call does
  // not return; "failed"
  std::string nvml = "absent";
  std::string nvml_text;    // the call that does not return, or why NVML failed
  bool kernel_log = false;  // it can be read
  double took_sec = 0;
  std::vector<GpuSample> gpus;
  std::vector<NetworkSample> network;
  std::vector<XidSample> xids;  // those since the sample before
};

// Limits of a sample. What is beyond them is left out.
constexpr size_t kMaxGpus = 64;
constexpr size_t kMaxNetworkDevices = 128;
constexpr size_t kMaxXids = 64;
constexpr size_t kMaxSampleBytes = 1u << 20;

// What a counter means, for the metrics page.
struct HardwareCounter {
  enum class Kind : uint8_t { kGpu, kNic, kPort };  // kPort: InfiniBand or RoCE
  Kind kind;
  const char* name;
  bool gauge;
  const char* help;
};
// All counters of a sample; others are dropped.
std::span<const HardwareCounter> hardwareCounters();

// One line without its end.
std::string hardwareSampleJson(const HardwareSample& sample);
// nullopt if the text is no sample.
std::optional<HardwareSample> hardwareSampleFrom(std::string_view text);

// "0000:3b:00" of "00000000:3B:00.0", "PCI:0000:3b:00" or "0000:3b:00": equal for the same device;
// "" if the text is no PCI address.
std::string pciKey(std::string_view text);

}  // namespace reft
