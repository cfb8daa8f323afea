#include "hang_detect/health/nvml_api.h"

namespace reft {

NvmlApi NvmlApi::from(const DynamicLibrary& library) {
  NvmlApi api;
#define REFT_NVML_FIND(member, symbol, arguments) \
  api.member = reinterpret_cast<decltype(api.member)>(library.find(symbol));
  REFT_NVML_FUNCTIONS(REFT_NVML_FIND)
#undef REFT_NVML_FIND
  api.errorString = reinterpret_cast<decltype(api.errorString)>(library.find("nvmlErrorString"));
  return api;
}

std::string NvmlApi::describe(nvml::Result result) const {
  const char* text = errorString == nullptr ? nullptr : errorString(result);
  return std::string(text == nullptr ? "error" : text) + " (" + std::to_string(result) + ")";
}

DynamicLibrary openNvml() {
  return DynamicLibrary::open({"libnvidia-ml.so.1"});
}

}  // namespace reft
