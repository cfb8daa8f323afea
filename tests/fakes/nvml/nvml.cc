// A stand-in for libnvidia-ml.so.1 whose answers are in the file that FAKE_NVML names. It is read
// again at each call, so a test changes a GPU by writing the file. A line each:
//
//   gpus 2                           how many there are; without it NVML finds no driver
//   set 1 ecc_volatile_corrected 7   a counter of GPU 1, under the name of a sample
//   lost 0                           GPU 0 has fallen off the bus
//   reset 0                          GPU 0 needs a reset
//   xid 0 79                         an Xid of GPU 0; each line is one event
//   block nvmlDeviceGetPowerUsage    this call never returns
//
// A counter that no line sets is 0, but for nvlinks_active, without which a GPU has no NVLinks.
//
// Threads: any number. Errors: those of NVML.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "hang_detect/health/nvml_api.h"

namespace fake_nvml {

using reft::nvml::Count;
using reft::nvml::Device;
using reft::nvml::EventSet;
using reft::nvml::Result;

constexpr Result kNotSupported = 3;
constexpr Result kInvalidArgument = 2;

struct Script {
  unsigned gpus = 0;
  std::map<std::pair<unsigned, std::string>, Count> counters;
  std::set<unsigned> lost, reset;
  std::vector<std::pair<unsigned, Count>> xids;
  std::set<std::string> blocked;
};

Script readScript() {
  Script script;
  const char* const path = std::getenv("FAKE_NVML");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word, name;
    unsigned gpu = 0;
    Count value = 0;
    words >> word;
    if (word == "gpus") {
      words >> script.gpus;
    } else if (word == "block") {
      words >> name;
      script.blocked.insert(name);
    } else if (word == "lost" && words >> gpu) {
      script.lost.insert(gpu);
    } else if (word == "reset" && words >> gpu) {
      script.reset.insert(gpu);
    } else if (word == "xid" && words >> gpu >> value) {
      script.xids.emplace_back(gpu, value);
    } else if (word == "set" && words >> gpu >> name >> value) {
      script.counters[{gpu, name}] = value;
    }
  }
  return script;
}

// The script, unless the call is one that never returns.
Script enter(const char* call) {
  Script script = readScript();
  while (script.blocked.contains(call)) {
    ::pause();
  }
  return script;
}

Device deviceOf(unsigned index) {
  return reinterpret_cast<Device>(static_cast<uintptr_t>(index) + 1);
}

unsigned indexOf(Device device) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(device) - 1);
}

Result stateOf(const Script& script, Device device) {
  const unsigned index = indexOf(device);
  return index >= script.gpus           ? kInvalidArgument
         : script.lost.contains(index)  ? reft::nvml::kGpuIsLost
         : script.reset.contains(index) ? reft::nvml::kResetRequired
                                        : reft::nvml::kSuccess;
}

template <typename Number>
Result counter(const char* call, Device device, const char* name, Number* value) {
  const Script script = enter(call);
  const Result result = stateOf(script, device);
  if (result == reft::nvml::kSuccess) {
    const auto found = script.counters.find({indexOf(device), name});
    *value = found == script.counters.end() ? Number{0} : static_cast<Number>(found->second);
  }
  return result;
}

std::atomic<size_t> delivered{0};  // Xids

}  // namespace fake_nvml

using namespace fake_nvml;  // NOLINT(google-build-using-namespace)

extern "C" {

const char* nvmlErrorString(Result result) {
  return result == reft::nvml::kGpuIsLost ? "GPU is lost" : "an error of the stand-in";
}

Result nvmlInit_v2() {
  return enter("nvmlInit_v2").gpus == 0 ? reft::nvml::kDriverNotLoaded : reft::nvml::kSuccess;
}

Result nvmlDeviceGetCount_v2(unsigned* count) {
  *count = enter("nvmlDeviceGetCount_v2").gpus;
  return reft::nvml::kSuccess;
}

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  *device = deviceOf(index);
  const Result state = stateOf(enter("nvmlDeviceGetHandleByIndex_v2"), *device);
  return state == reft::nvml::kResetRequired ? reft::nvml::kSuccess : state;
}

Result nvmlDeviceGetUUID(Device device, char* text, unsigned bytes) {
  std::snprintf(text, bytes, "GPU-ab12cd3%u-0000-0000-0000-000000000000", indexOf(device));
  return stateOf(enter("nvmlDeviceGetUUID"), device);
}

Result nvmlDeviceGetPciInfo_v3(Device device, reft::nvml::PciInfo* info) {
  std::memset(info, 0, sizeof(*info));
  std::snprintf(info->bus_id, sizeof(info->bus_id), "00000000:%02X:00.0", 0x3a + indexOf(device));
  return stateOf(enter("nvmlDeviceGetPciInfo_v3"), device);
}

Result nvmlDeviceGetTotalEccErrors(Device device, int error, int kind, Count* count) {
  const std::string name = std::string(kind == 0 ? "ecc_volatile_" : "ecc_aggregate_") +
                           (error == 0 ? "corrected" : "uncorrected");
  return counter("nvmlDeviceGetTotalEccErrors", device, name.c_str(), count);
}

Result nvmlDeviceGetRemappedRows(Device device, unsigned* corrected, unsigned* uncorrected,
                                 unsigned* pending, unsigned* failed) {
  const char* const call = "nvmlDeviceGetRemappedRows";
  counter(call, device, "remapped_rows_corrected", corrected);
  counter(call, device, "remapped_rows_uncorrected", uncorrected);
  counter(call, device, "remapping_pending", pending);
  return counter(call, device, "remapping_failed", failed);
}

Result nvmlDeviceGetCurrentClocksThrottleReasons(Device device, Count* reasons) {
  return counter("nvmlDeviceGetCurrentClocksThrottleReasons", device, "throttle_reasons", reasons);
}

Result nvmlDeviceGetTemperature(Device device, int, unsigned* celsius) {
  return counter("nvmlDeviceGetTemperature", device, "temperature_celsius", celsius);
}

Result nvmlDeviceGetPowerUsage(Device device, unsigned* milliwatts) {
  return counter("nvmlDeviceGetPowerUsage", device, "power_milliwatts", milliwatts);
}

Result nvmlDeviceGetPcieReplayCounter(Device device, unsigned* count) {
  return counter("nvmlDeviceGetPcieReplayCounter", device, "pcie_replays", count);
}

Result nvmlDeviceGetNvLinkState(Device device, unsigned link, int* active) {
  constexpr unsigned kLinks = 4;
  const Script script = enter("nvmlDeviceGetNvLinkState");
  const auto links = script.counters.find({indexOf(device), "nvlinks_active"});
  if (links == script.counters.end() || link >= kLinks) {
    return kNotSupported;
  }
  *active = link < links->second ? 1 : 0;
  return stateOf(script, device);
}

// Those of a GPU are all on its first link.
Result nvmlDeviceGetNvLinkErrorCounter(Device device, unsigned link, int kind, Count* count) {
  const char* const names[] = {"nvlink_replays", "nvlink_recoveries", "nvlink_crc_errors"};
  if (kind < 0 || kind > 2 || link != 0) {
    *count = 0;
    return reft::nvml::kSuccess;
  }
  return counter("nvmlDeviceGetNvLinkErrorCounter", device, names[kind], count);
}

Result nvmlEventSetCreate(EventSet* set) {
  *set = &delivered;
  return reft::nvml::kSuccess;
}

Result nvmlDeviceRegisterEvents(Device device, Count, EventSet) {
  return stateOf(enter("nvmlDeviceRegisterEvents"), device);
}

Result nvmlEventSetWait_v2(EventSet, reft::nvml::EventData* data, unsigned) {
  const Script script = enter("nvmlEventSetWait_v2");
  if (delivered >= script.xids.size()) {
    return reft::nvml::kTimeout;
  }
  const auto& [gpu, number] = script.xids[delivered++];
  *data = {deviceOf(gpu), reft::nvml::kEventXid, number, 0, 0};
  return reft::nvml::kSuccess;
}

}  // extern "C"
