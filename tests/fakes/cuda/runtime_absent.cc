// Functions of the runtime that torch links and the stand-in does not have: pools
// (backend:cudaMallocAsync), memory and events of other processes, and the insides of graphs. They
// say so, and fail.
//
// Apart from runtime.cc because they are defined without their arguments, against the declarations
// of CUDA's header.
#include <cstdio>

#include "tests/fakes/cuda/results.h"

#define ABSENT(name)                                             \
  extern "C" __attribute__((visibility("default"))) int name() { \
    std::fprintf(stderr, "fake CUDA: %s is not there\n", #name); \
    return reft::fake::kNotSupported;                            \
  }

ABSENT(cudaDeviceGetDefaultMemPool)
ABSENT(cudaMallocAsync)
ABSENT(cudaFreeAsync)
ABSENT(cudaMemPoolGetAttribute)
ABSENT(cudaMemPoolSetAccess)
ABSENT(cudaMemPoolSetAttribute)
ABSENT(cudaMemPoolTrimTo)
ABSENT(cudaIpcCloseMemHandle)
ABSENT(cudaIpcGetEventHandle)
ABSENT(cudaIpcGetMemHandle)
ABSENT(cudaIpcOpenEventHandle)
ABSENT(cudaIpcOpenMemHandle)
ABSENT(cudaGraphDebugDotPrint)
ABSENT(cudaGraphNodeGetDependencies)
