// The stand-in's driver and its controls, for C++ tests: loaded once, by the path that the build
// knows.
//
// Threads: any. Errors: a test that cannot load it ends.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "intercept/driver/cuda_api.h"
#include "intercept/driver/dynamic_library.h"

namespace reft {

class FakeCuda {
 public:
  static const FakeCuda& instance() {
    static const auto* const one = new FakeCuda;
    return *one;
  }

  const DynamicLibrary library;
  const CudaApi api;
  void (*const setCopyRate)(uint64_t bytes_per_sec);
  void (*const setKernelUs)(uint64_t us);
  void (*const setContention)(unsigned percent);
  int (*const launch)(void* stream, void (*function)(void*), void* argument);
  void (*const setJitter)(uint64_t max_us, uint64_t seed);
  void (*const hold)(int on);
  void (*const fail)(const char* function, uint64_t after, int code, int sticky);
  void (*const heal)();
  uint64_t (*const calls)(const char* function);
  uint64_t (*const contexts)();
  void* (*const shadow)(const void* address);
  const char* (*const refusal)();
  int (*const memAlloc)(cuda::Pointer* address, size_t bytes);
  int (*const memFree)(cuda::Pointer address);
  int (*const memsetD8)(cuda::Pointer to, unsigned char value, size_t bytes, cuda::Stream stream);
  int (*const beginCapture)(cuda::Stream stream, int mode);
  int (*const endCapture)(cuda::Stream stream, void** graph);
  int (*const destroyGraph)(void* graph);

 private:
  FakeCuda()
      : library(open()),
        api(CudaApi::from(library)),
        setCopyRate(find<void (*)(uint64_t)>("fake_cuda_set_copy_rate")),
        setKernelUs(find<void (*)(uint64_t)>("fake_cuda_set_kernel_us")),
        setContention(find<void (*)(unsigned)>("fake_cuda_set_contention")),
        launch(find<int (*)(void*, void (*)(void*), void*)>("fake_cuda_launch")),
        setJitter(find<void (*)(uint64_t, uint64_t)>("fake_cuda_set_jitter")),
        hold(find<void (*)(int)>("fake_cuda_hold")),
        fail(find<void (*)(const char*, uint64_t, int, int)>("fake_cuda_fail")),
        heal(find<void (*)()>("fake_cuda_heal")),
        calls(find<uint64_t (*)(const char*)>("fake_cuda_calls")),
        contexts(find<uint64_t (*)()>("fake_cuda_contexts")),
        shadow(find<void* (*)(const void*)>("fake_cuda_shadow")),
        refusal(find<const char* (*)()>("fake_cuda_refusal")),
        memAlloc(find<int (*)(cuda::Pointer*, size_t)>("cuMemAlloc_v2")),
        memFree(find<int (*)(cuda::Pointer)>("cuMemFree_v2")),
        memsetD8(
            find<int (*)(cuda::Pointer, unsigned char, size_t, cuda::Stream)>("cuMemsetD8Async")),
        beginCapture(find<int (*)(cuda::Stream, int)>("cuStreamBeginCapture_v2")),
        endCapture(find<int (*)(cuda::Stream, void**)>("cuStreamEndCapture")),
        destroyGraph(find<int (*)(void*)>("cuGraphDestroy")) {
    if (!api.available()) {
      std::fprintf(stderr, "no stand-in for CUDA: %s\n", api.why.c_str());
      std::abort();
    }
  }
  static DynamicLibrary open() {
    ::setenv("FAKE_CUDA_DEVICES", "3", 1);
    return DynamicLibrary::open({REFT_FAKE_CUDA_DRIVER});
  }
  template <typename Function>
  Function find(const char* name) const {
    return reinterpret_cast<Function>(library.find(name));
  }
};

}  // namespace reft
