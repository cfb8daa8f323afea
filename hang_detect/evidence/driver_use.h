// What a rank does in CUDA's driver, as the preloaded library has seen it
// (intercept/record/device_activity.h), and whether its device has failed
// (intercept/driver/device_error.h): evidence of a rank that answers.
//
// Threads: values; the functions are re-entrant.
// Errors:  none (except std::bad_alloc): a field that is absent or of another type is unknown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace reft {

struct DriverUse {
  static constexpr size_t kMaxCalls = 16;

  struct Call {
    int thread = 0;
    std::string name;    // "cuStreamSynchronize"
    bool waits = false;  // a call that returns when the device is through
    double since_sec = 0;
  };

  bool known = false;       // the library observes the process
  int64_t launches = 0;     // kernels and graphs
  std::string kernel;       // of the newest launch, mangled; "" = unknown
  double launch_sec = -1;   // since then; < 0 = none
  std::vector<Call> calls;  // that threads are in, the oldest first
  int error = 0;            // that lasts, as CUresult; 0 = none. Also without the library
  double error_sec = -1;    // since a call answered so first

  // The call in which a thread waits for the device; nullptr if it does not. `tid_bits`: of
  // OpThread.
  const Call* waitOf(uint16_t tid_bits) const;
  // "the newest of 14220 launches was sgemm, 62 s ago"; "" if nothing is known.
  std::string launchSentence() const;
  // "an illegal memory access (CUDA error 700), seen 62 s ago"; "" if no device has failed.
  std::string errorSentence() const;
};

nlohmann::json driverUseFields(const DriverUse& use);
DriverUse driverUseFrom(const nlohmann::json& fields);

}  // namespace reft
