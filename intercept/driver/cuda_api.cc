#include "intercept/driver/cuda_api.h"

#include "intercept/driver/dynamic_library.h"

namespace reft {

namespace {

DynamicLibrary driver() {
#ifdef REFT_WITHOUT_CUDA
  return DynamicLibrary::absent("built with REFT_WITH_CUDA=OFF");
#else
  return DynamicLibrary::open({"libcuda.so.1"});
#endif
}

}  // namespace

CudaApi CudaApi::from(const DynamicLibrary& library) {
  CudaApi api;
  if (!library) {
    api.why = library.why();
    return api;
  }
#define REFT_CUDA_FIND(member, symbol, arguments)                                    \
  api.member = reinterpret_cast<decltype(api.member)>(library.find(symbol));         \
  if (api.member == nullptr) {                                                       \
    api.why += (api.why.empty() ? "the driver lacks " : ", ") + std::string(symbol); \
  }
  REFT_CUDA_FUNCTIONS(REFT_CUDA_FIND)
#undef REFT_CUDA_FIND
  if (!api.why.empty()) {
    return api;
  }
  int devices = 0;
  cuda::Result result = api.init(0);
  if (result == cuda::kSuccess) {
    result = api.deviceGetCount(&devices);
  }
  if (result != cuda::kSuccess) {
    api.why = "cuInit: " + api.describe(result);
  } else if (devices == 0) {
    api.why = "no device";
  }
  api.driverGetVersion(&api.version);
  api.devices = devices;
  return api;
}

std::string CudaApi::describe(cuda::Result result) const {
  const char* text = nullptr;
  if (getErrorString != nullptr) {
    getErrorString(result, &text);
  }
  return std::string(text == nullptr ? "error" : text) + " (" + std::to_string(result) + ")";
}

const CudaApi& cudaApi() {
  static const CudaApi* api = new CudaApi(CudaApi::from(driver()));
  return *api;
}

}  // namespace reft
