// libcudart.so.13 of the stand-in: what the libraries of torch 2.11 (cu130) link, over the machine
// in the stand-in's libcuda.so.1.
//
// Kernels do nothing but take time: what torch computes is done by torch_ops.cc, above the kernels.
// Loading is eager, so each of these symbols has to exist; what nothing calls in training says that
// it is not supported.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/control.h"
#include "tests/fakes/cuda/device.h"

#define API extern "C" __attribute__((visibility("default")))
// Counts the call, gives the thread a context, and returns if the call has to fail.
#define ENTER()                                                                \
  do {                                                                         \
    machine().use();                                                           \
    if (const Result entered = calls().enter(__func__); entered != kSuccess) { \
      return failed(entered);                                                  \
    }                                                                          \
  } while (false)

using namespace reft::fake;

namespace {

thread_local cudaError_t t_error = cudaSuccess;

cudaError_t failed(Result result) {
  const auto error = static_cast<cudaError_t>(result);
  if (error != cudaSuccess) {
    t_error = error;
  }
  return error;
}

// A kernel or variable as the compiler's start-up code registers it. torch registers some ten
// thousand of each.
struct Variable {
  size_t bytes = 0;
  void* address = nullptr;  // on the device, once it is asked for
};
struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> kernels;  // host stub → mangled name
  std::unordered_map<const void*, Variable> variables;
};
Registry& registry() {
  static auto* const one = new Registry;
  return *one;
}

// The driver's functions that stand between a program and its device, looked up as the real runtime
// does: one by dlsym, the others by it.
struct Driver {
  int (*launchKernel)(const void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, unsigned, void* stream, void** arguments, void** extra) = nullptr;
  int (*streamSynchronize)(void* stream) = nullptr;
  int (*eventRecord)(void* event, void* stream) = nullptr;
  int (*eventSynchronize)(void* event) = nullptr;

  Driver() {
    using Lookup = int (*)(const char*, void**, int, uint64_t, int*);
    void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY);
    const auto lookup = reinterpret_cast<Lookup>(::dlsym(library, "cuGetProcAddress_v2"));
    const auto find = [&](auto& function, const char* name, int version) {
      lookup(name, reinterpret_cast<void**>(&function), version, 0, nullptr);
    };
    find(launchKernel, "cuLaunchKernel", 4000);
    find(streamSynchronize, "cuStreamSynchronize", 2000);
    find(eventRecord, "cuEventRecord", 2000);
    find(eventSynchronize, "cuEventSynchronize", 2000);
  }
};
const Driver& driver() {
  static const Driver one;
  return one;
}

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().kernels.find(kernel);
    if (found == registry().kernels.end()) {
      return failed(kInvalidDeviceFunction);
    }
    fake_cuda_add_kernel(kernel, found->second);
  }
  return failed(driver().launchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> t_configurations;

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool blocking) {
  return failed(machine().copy({to, from, bytes}, stream, blocking));
}

}  // namespace

// -- kernels
// ------------------------------------------------------------------------------------------------------------------

API void** __cudaRegisterFatBinary(void* binary) {
  return static_cast<void**>(binary);
}
API void __cudaRegisterFatBinaryEnd(void** /*binary*/) {}
API void __cudaUnregisterFatBinary(void** /*binary*/) {}
API char __cudaInitModule(void** /*binary*/) {
  return 1;
}
API void __cudaRegisterFunction(void** /*binary*/, const char* stub, char* /*device*/,
                                const char* name, int /*threads*/, uint3* /*tid*/, uint3* /*bid*/,
                                dim3* /*block*/, dim3* /*grid*/, int* /*warp*/) {
  const std::lock_guard lock(registry().mutex);
  registry().kernels[stub] = name;
}
API void __cudaRegisterVar(void** /*binary*/, char* host, char* /*address*/, const char* /*name*/,
                           int /*external*/, size_t bytes, int /*constant*/, int /*global*/) {
  const std::lock_guard lock(registry().mutex);
  registry().variables[host] = {bytes, nullptr};
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         struct CUstream_st* stream) {
  t_configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (t_configurations.empty()) {
    return failed(kMissingConfiguration);
  }
  const Configuration top = t_configurations.back();
  t_configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}
// The handle of a kernel is its host stub.
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 /*grid*/, dim3 /*block*/,
                                   void** /*arguments*/, size_t /*shared*/, cudaStream_t stream) {
  ENTER();
  return launch(kernel, stream);
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3 /*grid*/, dim3 /*block*/,
                                 void** /*arguments*/, size_t /*shared*/, cudaStream_t stream) {
  ENTER();
  return launch(kernel, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 /*grid*/, dim3 /*block*/,
                                            void** /*arguments*/, size_t /*shared*/,
                                            cudaStream_t stream) {
  ENTER();
  return launch(kernel, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* kernel,
                                    void** /*arguments*/) {
  ENTER();
  return launch(kernel, configuration->stream);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  ENTER();
  return failed(machine().enqueue(stream, [function, argument] { function(argument); }));
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void* argument, unsigned /*flags*/) {
  ENTER();
  return failed(machine().enqueue(stream, [=] { function(stream, cudaSuccess, argument); }));
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*kernel*/) {
  ENTER();
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/,
                                     int /*value*/) {
  ENTER();
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* /*kernel*/, int threads, size_t /*shared*/, unsigned /*flags*/) {
  ENTER();
  *blocks = threads > 0 && threads < 2048 ? 2048 / threads : 1;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                              int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  ENTER();
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().variables.find(symbol);
  if (found == registry().variables.end()) {
    return failed(kNotFound);
  }
  if (found->second.address == nullptr) {
    const Result result = machine().memory().allocate(Machine::current(), found->second.bytes,
                                                      &found->second.address);
    if (result != kSuccess) {
      return failed(result);
    }
  }
  *address = found->second.address;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes,
                                   size_t offset, cudaMemcpyKind /*kind*/) {
  void* address = nullptr;
  const cudaError_t error = cudaGetSymbolAddress(&address, symbol);
  return error == cudaSuccess
             ? copy(static_cast<char*>(address) + offset, from, bytes, nullptr, /*blocking=*/true)
             : error;
}

// -- devices
// ------------------------------------------------------------------------------------------------------------------

// Asks that need no context, and open none.
API cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine().devices();
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = Machine::current() < 0 ? 0 : Machine::current();
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= machine().devices()) {
    return failed(kInvalidDevice);
  }
  Machine::setCurrent(device);
  ENTER();
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API int cuDeviceGetAttribute(int* value, int attribute, int device);
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return failed(cuDeviceGetAttribute(value, static_cast<int>(attribute), device));
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= machine().devices()) {
    return failed(kInvalidDevice);
  }
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "fake CUDA (threads)");
  properties->uuid.bytes[0] = 'f';
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->pciBusID = device + 1;
  properties->totalGlobalMem = machine().memory().total();
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->totalConstMem = 65536;
  properties->textureAlignment = 512;
  properties->l2CacheSize = 50 << 20;
  properties->asyncEngineCount = 3;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->streamPrioritiesSupported = properties->cooperativeLaunch = 1;
  properties->hostRegisterSupported = properties->memoryPoolsSupported = 1;
  properties->hostNumaId = -1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  if (lowest != nullptr) {
    *lowest = 0;
  }
  if (highest != nullptr) {
    *highest = -5;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device == peer ? 0 : 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) {
  ENTER();
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  ENTER();
  return failed(machine().synchronizeDevice(Machine::current()));
}
API cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
API cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                 unsigned /*version*/, unsigned long long /*flags*/,
                                                 cudaDriverEntryPointQueryResult* found) {
  ENTER();
  // The newest version of a function is the one that counts.
  const std::string versioned = std::string(name) + "_v2";
  *function = ::dlsym(RTLD_DEFAULT, versioned.c_str());
  if (*function == nullptr) {
    *function = ::dlsym(RTLD_DEFAULT, name);
  }
  if (*function == nullptr) {  // exists, and is not supported: torch asks for a table of functions
                               // whose use is optional
    *function = ::dlsym(RTLD_DEFAULT, "cuModuleLoad");
  }
  if (found != nullptr) {
    *found = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

// -- errors
// -------------------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetLastError() {
  const cudaError_t error =
      t_error == cudaSuccess ? static_cast<cudaError_t>(calls().stuck()) : t_error;
  t_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() {
  return t_error == cudaSuccess ? static_cast<cudaError_t>(calls().stuck()) : t_error;
}
API const char* cudaGetErrorName(cudaError_t error) {
  return runtimeNameOf(static_cast<Result>(error));
}
API const char* cudaGetErrorString(cudaError_t error) {
  return textOf(static_cast<Result>(error));
}

// -- memory
// -------------------------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** address, size_t bytes) {
  ENTER();
  const Result unsafe = machine().unsafeCall();
  return failed(unsafe != kSuccess
                    ? unsafe
                    : machine().memory().allocate(Machine::current(), bytes, address));
}
API cudaError_t cudaFree(void* address) {
  ENTER();
  if (address == nullptr) {
    return cudaSuccess;  // the usual way of opening a context
  }
  if (const auto range = machine().memory().find(address)) {
    if (const Result result = machine().synchronizeDevice(range->device); result != kSuccess) {
      return failed(result);
    }
  }
  return failed(machine().memory().free(address));
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  ENTER();
  *total = machine().memory().total();
  *free_bytes = *total - machine().memory().used(Machine::current());
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned /*flags*/) {
  ENTER();
  const Result unsafe = machine().unsafeCall();
  return failed(unsafe != kSuccess ? unsafe : machine().memory().allocateHost(bytes, address));
}
API cudaError_t cudaFreeHost(void* address) {
  ENTER();
  return failed(machine().memory().freeHost(address));
}
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned /*flags*/) {
  ENTER();
  return failed(machine().memory().registerHost(address, bytes, Machine::current()));
}
API cudaError_t cudaHostUnregister(void* address) {
  ENTER();
  return failed(machine().memory().unregisterHost(address));
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  ENTER();
  *attributes = {};
  const auto range = machine().memory().find(address);
  if (!range) {  // plain host memory is no error
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
  }
  const bool host = range->kind == MemoryKind::kHost;
  attributes->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = range->device;
  attributes->devicePointer = const_cast<void*>(address);
  attributes->hostPointer = host ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/) {
  ENTER();
  return copy(to, from, bytes, nullptr, /*blocking=*/true);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                                cudaStream_t stream) {
  ENTER();
  return copy(to, from, bytes, stream, /*blocking=*/false);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from,
                                    int /*from_device*/, size_t bytes, cudaStream_t stream) {
  ENTER();
  return copy(to, from, bytes, stream, /*blocking=*/false);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind /*kind*/,
                                  cudaStream_t stream) {
  ENTER();
  return failed(
      machine().copy({to, from, width, height, to_pitch, from_pitch}, stream, /*blocking=*/false));
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  ENTER();
  return failed(
      machine().fill(to, static_cast<unsigned>(value), 1, bytes, stream, /*blocking=*/false));
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  ENTER();
  return failed(
      machine().fill(to, static_cast<unsigned>(value), 1, bytes, nullptr, /*blocking=*/true));
}

// -- streams, events
// ------------------------------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  ENTER();
  return failed(machine().createStream(flags, priority, reinterpret_cast<void**>(stream)));
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER();
  return failed(machine().destroyStream(stream));
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  ENTER();
  const auto asked = machine().stream(stream);
  *priority = asked == nullptr ? 0 : asked->priority;
  return failed(asked == nullptr ? kInvalidHandle : kSuccess);
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER();
  return failed(machine().queryStream(stream));
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER();
  return failed(driver().streamSynchronize(stream));
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  ENTER();
  return failed(machine().waitFor(stream, event));
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER();
  return failed(machine().createEvent(flags, reinterpret_cast<void**>(event)));
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER();
  return failed(machine().destroyEvent(event));
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                         unsigned /*flags*/) {
  ENTER();
  return failed(driver().eventRecord(event, stream));
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER();
  return failed(machine().query(event));
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER();
  return failed(driver().eventSynchronize(event));
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  ENTER();
  return failed(machine().elapsed(begin, end, ms));
}

// -- graphs
// -------------------------------------------------------------------------------------------------------------------

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER();
  int found = 0;
  const Result result = machine().captureStatus(stream, &found, nullptr);
  *status = static_cast<cudaStreamCaptureStatus>(found);
  return failed(result);
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  ENTER();
  int found = 0;
  uint64_t number = 0;
  const Result result = machine().captureStatus(stream, &found, &number);
  *status = static_cast<cudaStreamCaptureStatus>(found);
  if (id != nullptr) {
    *id = number;
  }
  if (graph != nullptr) {
    *graph = nullptr;
  }
  if (dependencies != nullptr) {
    *dependencies = nullptr;
  }
  if (edges != nullptr) {
    *edges = nullptr;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return failed(result);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER();
  *mode = static_cast<cudaStreamCaptureMode>(machine().exchangeMode(static_cast<int>(*mode)));
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ENTER();
  return failed(machine().beginCapture(stream, static_cast<int>(mode)));
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER();
  return failed(machine().endCapture(stream, reinterpret_cast<Graph**>(graph)));
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long /*flags*/) {
  ENTER();
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER();
  return failed(machine().launchGraph(*reinterpret_cast<Graph*>(executable), stream));
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* /*nodes*/, size_t* count) {
  ENTER();
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
