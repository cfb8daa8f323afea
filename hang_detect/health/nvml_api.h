// The functions of NVIDIA's NVML that reft-health calls, loaded from libnvidia-ml.so.1 at run time.
// A machine without it is a state, not an error.
//
// Declared here and not included, so that reft builds without NVIDIA's headers. A function that
// this version of the library lacks is nullptr: NVML grows, and drops what newer GPUs have no more.
//
// Any call may block for ever: the driver waits for a GPU that has fallen off the bus. So nothing
// but reft-health calls them.
//
// Threads: the table is read-only once it is filled. Errors: none; why() of the library explains an
// absent one.
#pragma once

#include <cstdint>
#include <string>

#include "intercept/driver/dynamic_library.h"

namespace reft {

namespace nvml {

using Result = int;                // nvmlReturn_t
using Device = void*;              // nvmlDevice_t
using EventSet = void*;            // nvmlEventSet_t
using Count = unsigned long long;  // NOLINT(google-runtime-int): as in nvml.h

constexpr Result kSuccess = 0;
constexpr Result kInsufficientSize = 7;
constexpr Result kDriverNotLoaded = 9;
constexpr Result kTimeout = 10;
constexpr Result kGpuIsLost = 15;
constexpr Result kResetRequired = 16;
constexpr Result kGpuNotFound = 28;

constexpr int kCorrected = 0, kUncorrected = 1;                      // nvmlMemoryErrorType_t
constexpr int kVolatile = 0, kAggregate = 1;                         // nvmlEccCounterType_t
constexpr int kTemperatureGpu = 0;                                   // nvmlTemperatureSensors_t
constexpr int kRetiredForCorrected = 0, kRetiredForUncorrected = 1;  // nvmlPageRetirementCause_t
// nvmlNvLinkErrorCounter_t
constexpr int kLinkReplay = 0, kLinkRecovery = 1, kLinkCrcFlit = 2, kLinkCrcData = 3;
constexpr unsigned kMaxLinks = 36;
constexpr Count kEventXid = 0x8;  // nvmlEventTypeXidCriticalError
constexpr Count kUnknownXid = 999;

struct PciInfo {  // nvmlPciInfo_t
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};

struct EventData {  // nvmlEventData_t
  Device device;
  Count type;
  Count data;
  unsigned gpu_instance, compute_instance;
};

}  // namespace nvml

// X(member, symbol, arguments)
#define REFT_NVML_FUNCTIONS(X)                                                                \
  X(init, "nvmlInit_v2", ())                                                                  \
  X(deviceGetCount, "nvmlDeviceGetCount_v2", (unsigned* count))                               \
  X(deviceGetHandle, "nvmlDeviceGetHandleByIndex_v2", (unsigned index, nvml::Device* device)) \
  X(deviceGetUuid, "nvmlDeviceGetUUID", (nvml::Device device, char* text, unsigned bytes))    \
  X(deviceGetPciInfo, "nvmlDeviceGetPciInfo_v3", (nvml::Device device, nvml::PciInfo * info)) \
  X(deviceGetEcc, "nvmlDeviceGetTotalEccErrors",                                              \
    (nvml::Device device, int error, int counter, nvml::Count* count))                        \
  X(deviceGetRetiredPages, "nvmlDeviceGetRetiredPages",                                       \
    (nvml::Device device, int cause, unsigned* count, nvml::Count* addresses))                \
  X(deviceGetRetirementPending, "nvmlDeviceGetRetiredPagesPendingStatus",                     \
    (nvml::Device device, int* pending))                                                      \
  X(deviceGetRemappedRows, "nvmlDeviceGetRemappedRows",                                       \
    (nvml::Device device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,      \
     unsigned* failed))                                                                       \
  X(deviceGetClocksEvents, "nvmlDeviceGetCurrentClocksEventReasons",                          \
    (nvml::Device device, nvml::Count * reasons))                                             \
  X(deviceGetThrottling, "nvmlDeviceGetCurrentClocksThrottleReasons",                         \
    (nvml::Device device, nvml::Count * reasons))                                             \
  X(deviceGetTemperature, "nvmlDeviceGetTemperature",                                         \
    (nvml::Device device, int sensor, unsigned* celsius))                                     \
  X(deviceGetPower, "nvmlDeviceGetPowerUsage", (nvml::Device device, unsigned* milliwatts))   \
  X(deviceGetLinkState, "nvmlDeviceGetNvLinkState",                                           \
    (nvml::Device device, unsigned link, int* active))                                        \
  X(deviceGetLinkErrors, "nvmlDeviceGetNvLinkErrorCounter",                                   \
    (nvml::Device device, unsigned link, int counter, nvml::Count* count))                    \
  X(deviceGetPcieReplays, "nvmlDeviceGetPcieReplayCounter",                                   \
    (nvml::Device device, unsigned* count))                                                   \
  X(eventSetCreate, "nvmlEventSetCreate", (nvml::EventSet * set))                             \
  X(deviceRegisterEvents, "nvmlDeviceRegisterEvents",                                         \
    (nvml::Device device, nvml::Count types, nvml::EventSet set))                             \
  X(eventSetWait, "nvmlEventSetWait_v2",                                                      \
    (nvml::EventSet set, nvml::EventData * data, unsigned milliseconds))

// What error messages call them.
struct NvmlNames {
#define REFT_NVML_NAME(member, symbol, arguments) static constexpr const char* member = symbol;
  REFT_NVML_FUNCTIONS(REFT_NVML_NAME)
#undef REFT_NVML_NAME
};

struct NvmlApi {
#define REFT_NVML_MEMBER(member, symbol, arguments) nvml::Result(*member) arguments = nullptr;
  REFT_NVML_FUNCTIONS(REFT_NVML_MEMBER)
#undef REFT_NVML_MEMBER
  const char* (*errorString)(nvml::Result result) = nullptr;

  bool available() const {
    return init && deviceGetCount && deviceGetHandle;
  }
  std::string describe(nvml::Result result) const;  // "Unknown Error (999)"

  static NvmlApi from(const DynamicLibrary& library);
};

// The name by which it is found: that of the loader, and no path.
DynamicLibrary openNvml();

}  // namespace reft
