// A thread that reads the GPUs, and notices when a call into NVML does not return.
//
// Threads: sample() by one thread. The thread itself, `health-nvml`, is never joined: a call that
// does not return keeps it until the process ends. Errors: none; no thread can be started:
// "failed".
#pragma once

#include <chrono>
#include <memory>

#include "hang_detect/evidence/hardware_sample.h"
#include "hang_detect/health/nvml_api.h"

namespace reft {

class GpuThread {
 public:
  struct Limits {
    std::chrono::milliseconds answer{4000};   // for a sample
    std::chrono::milliseconds begin{60'000};  // for the first one: NVML may initialize each GPU
  };
  GpuThread(NvmlApi api, Limits limits);

  // Fills nvml, nvml_text, gpus and xids. Waits at most Limits::answer. nvml is "silent" if a call
  // has not returned by then and does not run either, and "starting" if there is no answer yet.
  void sample(HardwareSample& sample);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  Limits limits_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace reft
