// The calls of CUDA's driver that the preloaded library observes, in one table.
//
// A hook has the ABI of one exported symbol. A base name (what programs pass to cuGetProcAddress)
// may stand for several ABIs: `since` and `before` bound the CUDA versions in which it means this
// one. No row reaches beyond the versions whose headers were read (CUDA 13): what a later one means
// by a name is unknown, and such a function stays unobserved.
//
// Threads: constants only. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reft {

// ONE(symbol, base, kind, since, before, object, parameters, arguments)
// TWO(symbol, twin, base, …)  twin: the same function for per-thread default streams
//   object: the handle that the call is about: kernel, graph, stream or event
// clang-format off
#define REFT_DRIVER_CALLS(ONE, TWO)                                                               \
  TWO(cuLaunchKernel, cuLaunchKernel_ptsz, "cuLaunchKernel", kLaunch, 4000, 14000, kernel,        \
      (void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,         \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,                   \
       void** parameters, void** extra),                                                          \
      (kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,           \
       parameters, extra))                                                                        \
  TWO(cuLaunchKernelEx, cuLaunchKernelEx_ptsz, "cuLaunchKernelEx", kLaunch, 11060, 14000, kernel, \
      (const void* configuration, void* kernel, void** parameters, void** extra),                 \
      (configuration, kernel, parameters, extra))                                                 \
  TWO(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz, "cuLaunchCooperativeKernel",     \
      kLaunch, 9000, 14000, kernel,                                                               \
      (void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,         \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,                   \
       void** parameters),                                                                        \
      (kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,           \
       parameters))                                                                               \
  TWO(cuGraphLaunch, cuGraphLaunch_ptsz, "cuGraphLaunch", kGraphLaunch, 10000, 14000, graph,      \
      (void* graph, void* stream), (graph, stream))                                               \
  TWO(cuMemcpyAsync, cuMemcpyAsync_ptsz, "cuMemcpyAsync", kCopy, 4000, 14000, stream,             \
      (uint64_t to, uint64_t from, size_t bytes, void* stream), (to, from, bytes, stream))        \
  TWO(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz, "cuMemcpyHtoDAsync", kCopy, 3020, 14000,   \
      stream, (uint64_t to, const void* from, size_t bytes, void* stream),                        \
      (to, from, bytes, stream))                                                                  \
  TWO(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz, "cuMemcpyDtoHAsync", kCopy, 3020, 14000,   \
      stream, (void* to, uint64_t from, size_t bytes, void* stream), (to, from, bytes, stream))   \
  TWO(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz, "cuMemcpyDtoDAsync", kCopy, 3020, 14000,   \
      stream, (uint64_t to, uint64_t from, size_t bytes, void* stream), (to, from, bytes, stream)) \
  TWO(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz, "cuMemcpyPeerAsync", kCopy, 4000, 14000, stream, \
      (uint64_t to, void* to_context, uint64_t from, void* from_context, size_t bytes,            \
       void* stream),                                                                             \
      (to, to_context, from, from_context, bytes, stream))                                        \
  TWO(cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz, "cuMemcpy2DAsync", kCopy, 3020, 14000, stream, \
      (const void* copy, void* stream), (copy, stream))                                           \
  TWO(cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz, "cuMemcpy3DAsync", kCopy, 3020, 14000, stream, \
      (const void* copy, void* stream), (copy, stream))                                           \
  TWO(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz, "cuMemcpy3DPeerAsync", kCopy, 4000, 14000,   \
      stream, (const void* copy, void* stream), (copy, stream))                                   \
  TWO(cuMemsetD8Async, cuMemsetD8Async_ptsz, "cuMemsetD8Async", kFill, 3020, 14000, stream,       \
      (uint64_t to, unsigned char value, size_t count, void* stream), (to, value, count, stream)) \
  TWO(cuMemsetD16Async, cuMemsetD16Async_ptsz, "cuMemsetD16Async", kFill, 3020, 14000, stream,    \
      (uint64_t to, unsigned short value, size_t count, void* stream),                            \
      (to, value, count, stream))                                                                 \
  TWO(cuMemsetD32Async, cuMemsetD32Async_ptsz, "cuMemsetD32Async", kFill, 3020, 14000, stream,    \
      (uint64_t to, unsigned value, size_t count, void* stream), (to, value, count, stream))      \
  TWO(cuMemcpy, cuMemcpy_ptds, "cuMemcpy", kBlockingCopy, 4000, 14000, nullptr,                   \
      (uint64_t to, uint64_t from, size_t bytes), (to, from, bytes))                              \
  TWO(cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, "cuMemcpyHtoD", kBlockingCopy, 3020, 14000, nullptr, \
      (uint64_t to, const void* from, size_t bytes), (to, from, bytes))                           \
  TWO(cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, "cuMemcpyDtoH", kBlockingCopy, 3020, 14000, nullptr, \
      (void* to, uint64_t from, size_t bytes), (to, from, bytes))                                 \
  TWO(cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds, "cuMemcpyDtoD", kBlockingCopy, 3020, 14000, nullptr, \
      (uint64_t to, uint64_t from, size_t bytes), (to, from, bytes))                              \
  TWO(cuStreamSynchronize, cuStreamSynchronize_ptsz, "cuStreamSynchronize", kStreamSync, 2000,    \
      14000, stream, (void* stream), (stream))                                                    \
  ONE(cuEventSynchronize, "cuEventSynchronize", kEventSync, 2000, 14000, event, (void* event),    \
      (event))                                                                                    \
  ONE(cuCtxSynchronize, "cuCtxSynchronize", kContextSync, 2000, 13000, nullptr, (), ())           \
  ONE(cuCtxSynchronize_v2, "cuCtxSynchronize", kContextSync, 13000, 14000, context,               \
      (void* context), (context))                                                                 \
  TWO(cuEventRecord, cuEventRecord_ptsz, "cuEventRecord", kEventRecord, 2000, 14000, event,       \
      (void* event, void* stream), (event, stream))                                               \
  TWO(cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz, "cuEventRecordWithFlags",              \
      kEventRecord, 11010, 14000, event, (void* event, void* stream, unsigned flags),             \
      (event, stream, flags))                                                                     \
  ONE(cuModuleUnload, "cuModuleUnload", kUnload, 2000, 14000, module, (void* module), (module))   \
  ONE(cuLibraryUnload, "cuLibraryUnload", kUnload, 12000, 14000, library, (void* library),        \
      (library))                                                                                  \
  ONE(cuCtxDestroy_v2, "cuCtxDestroy", kUnload, 4000, 14000, context, (void* context), (context)) \
  ONE(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", kUnload, 11000, 14000, nullptr,  \
      (int device), (device))                                                                     \
  ONE(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", kUnload, 11000, 14000, nullptr,      \
      (int device), (device))
// clang-format on

enum class DriverCall : uint16_t {
  none,
#define REFT_ONE(symbol, ...) symbol,
#define REFT_TWO(symbol, twin, ...) symbol,
  REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)
#undef REFT_ONE
#undef REFT_TWO
      count
};
constexpr size_t kDriverCalls = static_cast<size_t>(DriverCall::count);  // with `none`

enum class CallKind : uint8_t {
  kLaunch,
  kGraphLaunch,
  kCopy,  // enqueued; blocks with pageable memory
  kFill,
  kBlockingCopy,
  kStreamSync,
  kEventSync,
  kContextSync,
  kEventRecord,
  kUnload,  // of modules, and of contexts with theirs
  kCount
};
constexpr size_t kCallKinds = static_cast<size_t>(CallKind::kCount);

// Kind of a call, kCount for none and for a number out of range.
constexpr CallKind kindOf(DriverCall call) {
  constexpr CallKind kKinds[] = {CallKind::kCount,
#define REFT_ONE(symbol, base, kind, ...) CallKind::kind,
#define REFT_TWO(symbol, twin, base, kind, ...) CallKind::kind,
                                 REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)
#undef REFT_ONE
#undef REFT_TWO
  };
  return call < DriverCall::count ? kKinds[static_cast<size_t>(call)] : CallKind::kCount;
}

// Symbol of a call, "" for none and for a number out of range.
constexpr const char* nameOf(DriverCall call) {
  constexpr const char* kNames[] = {"",
#define REFT_ONE(symbol, ...) #symbol,
#define REFT_TWO(symbol, twin, ...) #symbol,
                                    REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)
#undef REFT_ONE
#undef REFT_TWO
  };
  return call < DriverCall::count ? kNames[static_cast<size_t>(call)] : "";
}

}  // namespace reft
