// The CUDA driver functions that reft calls, loaded from libcuda.so.1 at run time. A machine
// without a driver or a device is a state, not an error.
//
// Declared here and not included, so that reft builds without CUDA. The ABI of these functions does
// not change, as the _v2 names show. REFT_WITH_CUDA=OFF leaves the table empty.
//
// Threads: cudaApi() fills the table once; it is read-only afterwards.
// Errors:  none. A function that the driver lacks is nullptr; available() is false if one is
// missing,
//          or without a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace reft {

namespace cuda {
using Result = int;        // CUresult; 0 = success
using Device = int;        // CUdevice
using Pointer = uint64_t;  // CUdeviceptr
using Stream = void*;      // CUstream
using Event = void*;       // CUevent
using Context = void*;     // CUcontext
using Module = void*;      // CUmodule
using Function = void*;    // CUfunction
constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotReady = 600;
constexpr Result kCaptureImplicit =
    906;  // the legacy stream cannot be used while a blocking stream is captured
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventTiming = 0;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureNone = 0;         // CUstreamCaptureStatus
constexpr int kCaptureModeRelaxed = 2;  // CUstreamCaptureMode
}  // namespace cuda

// X(member, symbol, arguments)
#define REFT_CUDA_FUNCTIONS(X)                                                                     \
  X(init, "cuInit", (unsigned flags))                                                              \
  X(driverGetVersion, "cuDriverGetVersion", (int* version))                                        \
  X(deviceGetCount, "cuDeviceGetCount", (int* count))                                              \
  X(getErrorString, "cuGetErrorString", (cuda::Result result, const char** text))                  \
  X(ctxGetCurrent, "cuCtxGetCurrent", (cuda::Context * context))                                   \
  X(ctxSetCurrent, "cuCtxSetCurrent", (cuda::Context context))                                     \
  X(ctxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int* lowest, int* highest))         \
  X(devicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState",                                        \
    (cuda::Device device, unsigned* flags, int* active))                                           \
  X(devicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                                            \
    (cuda::Context * context, cuda::Device device))                                                \
  X(devicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (cuda::Device device))                \
  X(memHostRegister, "cuMemHostRegister_v2", (void* address, size_t bytes, unsigned flags))        \
  X(memHostUnregister, "cuMemHostUnregister", (void* address))                                     \
  X(memHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                                       \
    (cuda::Pointer * device, void* host, unsigned flags))                                          \
  X(memAlloc, "cuMemAlloc_v2", (cuda::Pointer * address, size_t bytes))                            \
  X(memFree, "cuMemFree_v2", (cuda::Pointer address))                                              \
  X(memsetD8Async, "cuMemsetD8Async",                                                              \
    (cuda::Pointer to, unsigned char value, size_t bytes, cuda::Stream stream))                    \
  X(moduleLoadData, "cuModuleLoadData", (cuda::Module * module, const void* image))                \
  X(moduleUnload, "cuModuleUnload", (cuda::Module module))                                         \
  X(moduleGetFunction, "cuModuleGetFunction",                                                      \
    (cuda::Function * function, cuda::Module module, const char* name))                            \
  X(launchKernel, "cuLaunchKernel",                                                                \
    (cuda::Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, cuda::Stream stream,               \
     void** arguments, void** extra))                                                              \
  X(memcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                                       \
    (void* to, cuda::Pointer from, size_t bytes, cuda::Stream stream))                             \
  X(memcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                                       \
    (cuda::Pointer to, cuda::Pointer from, size_t bytes, cuda::Stream stream))                     \
  X(memcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                       \
    (cuda::Pointer to, const void* from, size_t bytes, cuda::Stream stream))                       \
  X(streamCreate, "cuStreamCreateWithPriority",                                                    \
    (cuda::Stream * stream, unsigned flags, int priority))                                         \
  X(streamDestroy, "cuStreamDestroy_v2", (cuda::Stream stream))                                    \
  X(streamSynchronize, "cuStreamSynchronize", (cuda::Stream stream))                               \
  X(streamWaitEvent, "cuStreamWaitEvent",                                                          \
    (cuda::Stream stream, cuda::Event event, unsigned flags))                                      \
  X(streamQuery, "cuStreamQuery", (cuda::Stream stream))                                           \
  X(streamIsCapturing, "cuStreamIsCapturing", (cuda::Stream stream, int* status))                  \
  X(streamWriteValue32, "cuStreamWriteValue32_v2",                                                 \
    (cuda::Stream stream, cuda::Pointer to, uint32_t value, unsigned flags))                       \
  X(threadExchangeCaptureMode, "cuThreadExchangeStreamCaptureMode", (int* mode))                   \
  X(eventCreate, "cuEventCreate", (cuda::Event * event, unsigned flags))                           \
  X(eventDestroy, "cuEventDestroy_v2", (cuda::Event event))                                        \
  X(eventRecord, "cuEventRecord", (cuda::Event event, cuda::Stream stream))                        \
  X(eventQuery, "cuEventQuery", (cuda::Event event))                                               \
  X(eventElapsedTime, "cuEventElapsedTime", (float* ms, cuda::Event begin, cuda::Event end))

class DynamicLibrary;

struct CudaApi {
#define REFT_CUDA_MEMBER(member, symbol, arguments) cuda::Result(*member) arguments = nullptr;
  REFT_CUDA_FUNCTIONS(REFT_CUDA_MEMBER)
#undef REFT_CUDA_MEMBER

  int version = 0;  // as of cuDriverGetVersion, 12040 = 12.4
  int devices = 0;
  std::string why;  // why available() is false

  bool available() const {
    return devices > 0;
  }
  std::string describe(cuda::Result result) const;  // "invalid argument (1)"

  // Fills a table from a driver library and calls cuInit; creates no context.
  static CudaApi from(const DynamicLibrary& library);
};

// The table of this process, filled at the first call.
const CudaApi& cudaApi();

}  // namespace reft
