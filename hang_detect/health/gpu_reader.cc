#include "hang_detect/health/gpu_reader.h"

#include <algorithm>
#include <cstring>

#include "hang_detect/health/kernel_log.h"
#include "hang_detect/stacks/printable.h"
#include "intercept/base/clock.h"

namespace reft {

namespace {

constexpr nvml::Result kNoFunction = 13;  // NVML_ERROR_FUNCTION_NOT_FOUND
constexpr int kMostEvents = 256;          // taken at a time

template <size_t kSize>
std::string textOf(const char (&text)[kSize]) {
  return printable(std::string_view(text, ::strnlen(text, kSize)), kSize);
}

}  // namespace

// REFT_NVML(member, gpu, arguments...): the call of a member of the table.
#define REFT_NVML(member, gpu, ...) \
  call(NvmlNames::member, gpu, api_.member __VA_OPT__(, ) __VA_ARGS__)

template <typename Function, typename... Arguments>
nvml::Result GpuReader::call(const char* name, int gpu, Function function, Arguments... arguments) {
  if (function == nullptr) {
    return kNoFunction;
  }
  progress_.gpu = gpu;
  progress_.since_ns = SteadyClock::instance().nowNs();
  progress_.call = name;
  const nvml::Result result = function(arguments...);
  progress_.call = nullptr;
  return result;
}

void GpuReader::read(HardwareSample& sample) {
  if (!begin(sample)) {
    return;
  }
  sample.nvml = "ok";
  for (size_t i = 0; i < gpus_.size(); ++i) {
    sample.gpus.push_back(readGpu(static_cast<int>(i)));
  }
  readXids(sample.xids);
  progress_.began = true;
}

bool GpuReader::begin(HardwareSample& sample) {
  if (begun_) {
    return true;
  }
  if (!api_.available()) {
    sample.nvml = "absent";
    return false;
  }
  unsigned count = 0;
  nvml::Result result = REFT_NVML(init, -1);
  if (result == nvml::kSuccess) {
    result = REFT_NVML(deviceGetCount, -1, &count);
  }
  if (result != nvml::kSuccess || count == 0) {
    const bool absent = result == nvml::kSuccess || result == nvml::kDriverNotLoaded ||
                        result == nvml::kGpuNotFound;
    sample.nvml = absent ? "absent" : "failed";
    sample.nvml_text = absent ? "" : api_.describe(result);
    return false;
  }
  gpus_.resize(std::min<size_t>(count, kMaxGpus));
  if (REFT_NVML(eventSetCreate, -1, &events_) != nvml::kSuccess) {
    events_ = nullptr;
  }
  for (size_t i = 0; i < gpus_.size(); ++i) {
    find(gpus_[i], static_cast<unsigned>(i));
  }
  begun_ = true;
  return true;
}

// False if the GPU is lost, or cannot be reached.
bool GpuReader::find(Gpu& gpu, unsigned index) {
  const int number = static_cast<int>(index);
  const nvml::Result result = REFT_NVML(deviceGetHandle, number, index, &gpu.device);
  if (result != nvml::kSuccess) {
    gpu.device = nullptr;
    return result != nvml::kGpuIsLost;
  }
  char uuid[96] = {};
  if (REFT_NVML(deviceGetUuid, number, gpu.device, uuid, unsigned{sizeof(uuid)}) ==
      nvml::kSuccess) {
    gpu.uuid = textOf(uuid);
  }
  nvml::PciInfo info{};
  if (REFT_NVML(deviceGetPciInfo, number, gpu.device, &info) == nvml::kSuccess) {
    gpu.pci = textOf(info.bus_id);
  }
  if (events_ != nullptr) {
    REFT_NVML(deviceRegisterEvents, number, gpu.device, nvml::kEventXid, events_);
  }
  return true;
}

GpuSample GpuReader::readGpu(int index) {
  Gpu& gpu = gpus_[static_cast<size_t>(index)];
  GpuSample sample;
  sample.index = index;
  if (gpu.device == nullptr) {
    sample.gone = !find(gpu, static_cast<unsigned>(index));
  }
  sample.uuid = gpu.uuid;
  sample.pci = gpu.pci;
  if (gpu.device == nullptr) {
    return sample;
  }
  const auto keep = [&](const char* name, nvml::Result result, uint64_t value) {
    sample.gone = sample.gone || result == nvml::kGpuIsLost;
    sample.needs_reset = sample.needs_reset || result == nvml::kResetRequired;
    if (result == nvml::kSuccess) {
      sample.counters.emplace(name, value);
    }
  };
  // The first call says whether the GPU is lost: nothing more is asked of it then.
  unsigned value = 0;
  nvml::Result result =
      REFT_NVML(deviceGetTemperature, index, gpu.device, nvml::kTemperatureGpu, &value);
  keep("temperature_celsius", result, value);
  if (sample.gone) {
    return sample;
  }
  value = 0;
  result = REFT_NVML(deviceGetPower, index, gpu.device, &value);
  keep("power_milliwatts", result, value);
  nvml::Count reasons = 0;
  result = REFT_NVML(deviceGetClocksEvents, index, gpu.device, &reasons);
  if (result == kNoFunction) {
    result = REFT_NVML(deviceGetThrottling, index, gpu.device, &reasons);
  }
  keep("throttle_reasons", result, reasons);
  value = 0;
  result = REFT_NVML(deviceGetPcieReplays, index, gpu.device, &value);
  keep("pcie_replays", result, value);
  const struct {
    const char* name;
    int error, counter;
  } kEcc[] = {
      {"ecc_volatile_corrected", nvml::kCorrected, nvml::kVolatile},
      {"ecc_volatile_uncorrected", nvml::kUncorrected, nvml::kVolatile},
      {"ecc_aggregate_corrected", nvml::kCorrected, nvml::kAggregate},
      {"ecc_aggregate_uncorrected", nvml::kUncorrected, nvml::kAggregate},
  };
  for (const auto& ecc : kEcc) {
    nvml::Count count = 0;
    result = REFT_NVML(deviceGetEcc, index, gpu.device, ecc.error, ecc.counter, &count);
    keep(ecc.name, result, count);
  }
  readMemory(gpu, sample);
  readLinks(gpu, sample);
  return sample;
}

// Pages that are retired (GPUs before Ampere), or rows that are remapped (later ones).
void GpuReader::readMemory(const Gpu& gpu, GpuSample& sample) {
  int pending = 0;
  if (REFT_NVML(deviceGetRetirementPending, sample.index, gpu.device, &pending) == nvml::kSuccess) {
    sample.counters.emplace("retirement_pending", pending != 0);
    uint64_t pages = 0;
    for (const int cause : {nvml::kRetiredForCorrected, nvml::kRetiredForUncorrected}) {
      unsigned count = 0;  // 0: asks for the number only
      const nvml::Result result = REFT_NVML(deviceGetRetiredPages, sample.index, gpu.device, cause,
                                            &count, static_cast<nvml::Count*>(nullptr));
      pages += result == nvml::kSuccess || result == nvml::kInsufficientSize ? count : 0;
    }
    sample.counters.emplace("retired_pages", pages);
  }
  unsigned corrected = 0, uncorrected = 0, waits = 0, failed = 0;
  if (REFT_NVML(deviceGetRemappedRows, sample.index, gpu.device, &corrected, &uncorrected, &waits,
                &failed) == nvml::kSuccess) {
    sample.counters.emplace("remapped_rows_corrected", corrected);
    sample.counters.emplace("remapped_rows_uncorrected", uncorrected);
    sample.counters.emplace("remapping_pending", waits != 0);
    sample.counters.emplace("remapping_failed", failed != 0);
  }
}

void GpuReader::readLinks(const Gpu& gpu, GpuSample& sample) {
  const struct {
    const char* name;
    int counter;
  } kErrors[] = {{"nvlink_replays", nvml::kLinkReplay},
                 {"nvlink_recoveries", nvml::kLinkRecovery},
                 {"nvlink_crc_errors", nvml::kLinkCrcFlit},
                 {"nvlink_crc_errors", nvml::kLinkCrcData}};
  bool any = false;
  uint64_t links = 0;
  for (unsigned link = 0; link < nvml::kMaxLinks; ++link) {
    int active = 0;
    if (REFT_NVML(deviceGetLinkState, sample.index, gpu.device, link, &active) != nvml::kSuccess) {
      break;  // this GPU has no more of them
    }
    any = true;
    if (active == 0) {
      continue;
    }
    ++links;
    for (const auto& error : kErrors) {
      nvml::Count count = 0;
      if (REFT_NVML(deviceGetLinkErrors, sample.index, gpu.device, link, error.counter, &count) ==
          nvml::kSuccess) {
        sample.counters[error.name] += count;
      }
    }
  }
  if (any) {
    sample.counters.emplace("nvlinks_active", links);
  }
}

void GpuReader::readXids(std::vector<XidSample>& xids) {
  for (int i = 0; events_ != nullptr && i < kMostEvents; ++i) {
    nvml::EventData event{};
    const nvml::Result result = REFT_NVML(eventSetWait, -1, events_, &event, 0U);
    if (result != nvml::kSuccess) {
      break;
    }
    if (event.type != nvml::kEventXid || event.data == 0 || event.data >= nvml::kUnknownXid) {
      continue;
    }
    XidSample xid;
    xid.number = static_cast<int>(event.data);
    xid.from_nvml = 1;
    const auto gpu =
        std::ranges::find_if(gpus_, [&](const Gpu& known) { return known.device == event.device; });
    xid.pci = gpu == gpus_.end() ? "" : pciKey(gpu->pci);
    addXid(xids, xid);
  }
}

#undef REFT_NVML

}  // namespace reft
