// Reads the counters of all GPUs of this machine, and the Xid errors of their driver, with NVML.
//
// Every call may block for ever. Progress says in which one the reader is, for a thread that
// watches it (gpu_thread.h).
//
// Threads: read() by one thread at a time; Progress by any. Errors: none; a call that fails leaves
// its counter out.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "hang_detect/evidence/hardware_sample.h"
#include "hang_detect/health/nvml_api.h"

namespace reft {

class GpuReader {
 public:
  struct Progress {
    std::atomic<const char*> call{nullptr};  // symbol of the call under way; nullptr: none
    std::atomic<int> gpu{-1};                // the GPU that it is about; -1: none
    std::atomic<int64_t> since_ns{0};        // when it began
    std::atomic<bool> began{false};          // NVML is initialized, and knows its GPUs
  };

  GpuReader(NvmlApi api, Progress& progress) : api_(api), progress_(progress) {}
  // Fills nvml, nvml_text, gpus and xids.
  void read(HardwareSample& sample);

 private:
  struct Gpu {
    nvml::Device device = nullptr;  // nullptr: lost
    std::string uuid, pci;
  };
  // Makes a call, if this library has it.
  template <typename Function, typename... Arguments>
  nvml::Result call(const char* name, int gpu, Function function, Arguments... arguments);
  bool begin(HardwareSample& sample);
  bool find(Gpu& gpu, unsigned index);
  GpuSample readGpu(int index);
  void readMemory(const Gpu& gpu, GpuSample& sample);
  void readLinks(const Gpu& gpu, GpuSample& sample);
  void readXids(std::vector<XidSample>& xids);

  const NvmlApi api_;
  Progress& progress_;
  bool begun_ = false;
  nvml::EventSet events_ = nullptr;
  std::vector<Gpu> gpus_;
};

}  // namespace reft
