// A copy of the CUDA runtime as it is linked statically into programs, cuBLAS and NCCL: of what it
// needs of the driver, it looks up one function by dlsym and the rest by that function.
//
// Threads: one. Errors: `problem` says what was not found; empty: nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct StaticRuntime {
  static constexpr uint64_t kLegacy = 1;
  static constexpr uint64_t kPerThread = 2;

  const char* problem = "";
  int (*launchKernel)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, void* stream, void** parameters, void** extra) = nullptr;
  int (*launchKernelEx)(const void* configuration, void* kernel, void** parameters,
                        void** extra) = nullptr;
  int (*graphLaunch)(void* executable, void* stream) = nullptr;
  int (*memcpyHtoDAsync)(uint64_t to, const void* from, size_t bytes, void* stream) = nullptr;
  int (*memcpyDtoHAsync)(void* to, uint64_t from, size_t bytes, void* stream) = nullptr;
  int (*streamSynchronize)(void* stream) = nullptr;
  int (*eventRecord)(void* event, void* stream) = nullptr;
  int (*eventRecordWithFlags)(void* event, void* stream, unsigned flags) = nullptr;
  int (*eventSynchronize)(void* event) = nullptr;
  int (*getProcAddress)(const char* name, void** function, int version, uint64_t flags,
                        int* found) = nullptr;

  int launch(void* kernel, void* stream = nullptr) const {
    return launchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
  }
};

// The function `static_runtime` of each library that has such a runtime.
using StartRuntime = StaticRuntime* (*)(uint64_t flags);
