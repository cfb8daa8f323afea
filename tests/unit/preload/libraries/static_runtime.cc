#include "tests/unit/preload/libraries/static_runtime.h"

#include <dlfcn.h>

extern "C" __attribute__((visibility("default"))) StaticRuntime* static_runtime(uint64_t flags) {
  static StaticRuntime runtimes[2];
  StaticRuntime& runtime = runtimes[flags == StaticRuntime::kPerThread ? 1 : 0];
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) {
    runtime.problem = "libcuda.so.1";
    return &runtime;
  }
  runtime.getProcAddress =
      reinterpret_cast<decltype(runtime.getProcAddress)>(::dlsym(driver, "cuGetProcAddress_v2"));
  if (runtime.getProcAddress == nullptr) {
    runtime.problem = "cuGetProcAddress_v2";
    return &runtime;
  }
  const bool per_thread = flags == StaticRuntime::kPerThread;
  const auto find = [&](auto& member, const char* name, int version) {
    void* function = nullptr;
    int found = -1;
    if (runtime.getProcAddress(name, &function, version, flags, &found) != 0 || found != 0) {
      runtime.problem = name;
    }
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(function);
  };
  // The versions that libcudart 13 asks for.
  find(runtime.launchKernel, "cuLaunchKernel", per_thread ? 7000 : 4000);
  find(runtime.launchKernelEx, "cuLaunchKernelEx", 11060);
  find(runtime.graphLaunch, "cuGraphLaunch", 10000);
  find(runtime.memcpyHtoDAsync, "cuMemcpyHtoDAsync", per_thread ? 7000 : 3020);
  find(runtime.memcpyDtoHAsync, "cuMemcpyDtoHAsync", per_thread ? 7000 : 3020);
  find(runtime.streamSynchronize, "cuStreamSynchronize", per_thread ? 7000 : 2000);
  find(runtime.eventRecord, "cuEventRecord", per_thread ? 7000 : 2000);
  find(runtime.eventRecordWithFlags, "cuEventRecordWithFlags", 11010);
  find(runtime.eventSynchronize, "cuEventSynchronize", 2000);
  return &runtime;
}
