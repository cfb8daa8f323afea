// libcuda.so.1 of the stand-in: the driver functions that reft's table and libcaffe2_nvrtc.so want,
// and the controls.
//
// The driver has no headers here, as in intercept/driver/cuda_api.h: the ABI is part of its
// promise. Kernels are those of PTX texts that ptx.h knows. Functions that torch links but that
// only a compiler of kernels needs exist and say that they are not supported.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/control.h"
#include "tests/fakes/cuda/device.h"
#include "tests/fakes/cuda/ptx.h"

#define API extern "C" __attribute__((visibility("default")))
// Counts the call; returns if it has to fail. A context that has failed does not spoil what needs
// none.
#define COUNT(in_context)                                                                  \
  do {                                                                                     \
    if (const Result entered = calls().enter(__func__, in_context); entered != kSuccess) { \
      return entered;                                                                      \
    }                                                                                      \
  } while (false)
#define ENTER() COUNT(true)

using namespace reft::fake;

namespace {

struct Context {
  int device;
  std::atomic<int> retained{0};
};

Context* contextOf(int device) {
  static auto* const all = [] {
    auto* made = new std::array<Context, 64>;
    for (int i = 0; i < 64; ++i) {
      (*made)[static_cast<size_t>(i)].device = i;
    }
    return made;
  }();
  return &(*all)[static_cast<size_t>(device)];
}

bool known(int device) {
  return device >= 0 && device < machine().devices();
}

constexpr int kDriverVersion = 13000;
constexpr int kLowestPriority = 0;
constexpr int kHighestPriority = -5;

// CUdevice_attribute and cudaDeviceAttr have the same numbers.
int attributeOf(int attribute) {
  constexpr std::array<std::pair<int, int>, 14> kValues = {{
      {1, 1024},   // threads per block
      {8, 49152},  // shared memory per block
      {10, 32},    // warp
      {16, 132},   // multiprocessors
      {19, 1},     // can map host memory
      {31, 1},     // concurrent kernels
      {39, 2048},  // threads per multiprocessor
      {41, 1},     // unified addressing
      {75, 9},     // compute capability
      {76, 0},
      {91, 1},       // host pointers of registered memory
      {95, 1},       // cooperative launch
      {97, 232448},  // shared memory per block, opted in
      {99, 1},       // registered host memory
  }};
  for (const auto& [name, value] : kValues) {
    if (name == attribute) {
      return value;
    }
  }
  return 0;
}

// What was loaded, by the handles that the program has.
class Modules {
 public:
  struct Loaded {
    std::shared_ptr<const PtxKernel> kernel;  // nullptr: the handle is none, or was unloaded
    int device = -1;
  };

  void* add(PtxModule module, int device) {
    auto made = std::make_unique<Module>(Module{std::move(module), device});
    void* const handle = made.get();
    const std::lock_guard lock(mutex_);
    modules_[handle] = std::move(made);
    return handle;
  }
  bool remove(void* module) {
    const std::lock_guard lock(mutex_);
    return modules_.erase(module) == 1;
  }
  Result function(void* module, const char* name, void** function) const {
    const std::lock_guard lock(mutex_);
    const auto found = modules_.find(module);
    if (found == modules_.end()) {
      return kInvalidHandle;
    }
    for (const auto& kernel : found->second->content.kernels) {
      if (kernel->name() == name) {
        *function = const_cast<PtxKernel*>(kernel.get());
        return kSuccess;
      }
    }
    return kNotFound;
  }
  Loaded find(const void* function) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, module] : modules_) {
      for (const auto& kernel : module->content.kernels) {
        if (kernel.get() == function) {
          return {kernel, module->device};
        }
      }
    }
    return {};
  }

 private:
  struct Module {
    PtxModule content;
    int device;
  };
  mutable std::mutex mutex_;
  std::map<void*, std::unique_ptr<Module>> modules_;
};

Modules& modules() {
  static auto* const all = new Modules;
  return *all;
}

// Kernels without a text; see control.h.
class NamedKernels {
 public:
  void add(const void* handle, const char* name) {
    const std::lock_guard lock(mutex_);
    names_.try_emplace(handle, name);
  }
  // nullptr for a handle that is none. The text stays.
  const char* find(const void* handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = names_.find(handle);
    return found == names_.end() ? nullptr : found->second.c_str();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const void*, std::string> names_;
};

NamedKernels& namedKernels() {
  static auto* const all = new NamedKernels;
  return *all;
}

constexpr unsigned kMostThreads = 1024;  // of a block
thread_local std::string t_refusal;      // of the calling thread's newest module

}  // namespace

API int cuInit(unsigned /*flags*/) {
  COUNT(false);
  return kSuccess;
}
API int cuDriverGetVersion(int* version) {
  COUNT(false);
  *version = kDriverVersion;
  return kSuccess;
}
API int cuDeviceGetCount(int* count) {
  COUNT(false);
  *count = machine().devices();
  return kSuccess;
}
API int cuDeviceGet(int* device, int ordinal) {
  COUNT(false);
  *device = ordinal;
  return known(ordinal) ? kSuccess : kInvalidDevice;
}
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  COUNT(false);
  *value = attributeOf(attribute);
  return known(device) ? kSuccess : kInvalidDevice;
}
API int cuGetErrorString(int result, const char** text) {
  *text = textOf(result);
  return kSuccess;
}

API int cuCtxGetCurrent(void** context) {
  COUNT(false);
  *context = Machine::current() < 0 ? nullptr : contextOf(Machine::current());
  return kSuccess;
}
API int cuCtxSetCurrent(void* context) {
  COUNT(false);
  Machine::setCurrent(context == nullptr ? -1 : static_cast<Context*>(context)->device);
  return kSuccess;
}
API int cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
  ENTER();
  *lowest = kLowestPriority;
  *highest = kHighestPriority;
  return Machine::current() < 0 ? kInvalidContext : kSuccess;
}
API int cuCtxSynchronize() {
  ENTER();
  return Machine::current() < 0 ? kInvalidContext : machine().synchronizeDevice(Machine::current());
}
API int cuCtxSynchronize_v2(void* context) {
  ENTER();
  return context == nullptr ? kInvalidContext
                            : machine().synchronizeDevice(static_cast<Context*>(context)->device);
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
  COUNT(false);
  if (!known(device)) {
    return kInvalidDevice;
  }
  machine().activate(device);
  contextOf(device)->retained.fetch_add(1);
  *context = contextOf(device);
  return kSuccess;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
  COUNT(false);
  if (!known(device)) {
    return kInvalidDevice;
  }
  return contextOf(device)->retained.fetch_sub(1) > 0 ? kSuccess : kInvalidContext;
}
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  COUNT(false);
  if (!known(device)) {
    return kInvalidDevice;
  }
  if (flags != nullptr) {
    *flags = 0;
  }
  *active = machine().active(device) ? 1 : 0;
  return kSuccess;
}

API int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  ENTER();
  if (Machine::current() < 0) {
    return kInvalidContext;
  }
  if (const Result result = machine().unsafeCall(); result != kSuccess) {
    return result;
  }
  void* found = nullptr;
  const Result result =
      bytes == 0 ? kInvalidValue : machine().memory().allocate(Machine::current(), bytes, &found);
  *address = reinterpret_cast<uint64_t>(found);
  return result;
}
API int cuMemFree_v2(uint64_t address) {
  ENTER();
  const auto range = machine().memory().find(reinterpret_cast<void*>(address));
  if (range) {  // frees wait for the device
    if (const Result result = machine().synchronizeDevice(range->device); result != kSuccess) {
      return result;
    }
  }
  return machine().memory().free(reinterpret_cast<void*>(address));
}
API int cuMemHostRegister_v2(void* address, size_t bytes, unsigned /*flags*/) {
  ENTER();
  if (Machine::current() < 0) {
    return kInvalidContext;
  }
  if (const Result result = machine().unsafeCall(); result != kSuccess) {
    return result;
  }
  return machine().memory().registerHost(address, bytes, Machine::current());
}
API int cuMemHostUnregister(void* address) {
  ENTER();
  if (const Result result = machine().unsafeCall(); result != kSuccess) {
    return result;
  }
  return machine().memory().unregisterHost(address);
}
API int cuMemHostGetDevicePointer_v2(uint64_t* device_address, void* address, unsigned /*flags*/) {
  ENTER();
  const auto range = machine().memory().find(address);
  *device_address = reinterpret_cast<uint64_t>(address);
  return range && range->kind == MemoryKind::kHost ? kSuccess : kInvalidValue;
}
// CU_POINTER_ATTRIBUTE_MEMORY_TYPE and DEVICE_ORDINAL.
API int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  ENTER();
  constexpr int kMemoryType = 2;
  constexpr int kOrdinal = 9;
  const auto range = machine().memory().find(reinterpret_cast<void*>(address));
  if (!range) {
    return kInvalidValue;
  }
  if (attribute == kMemoryType) {
    *static_cast<unsigned*>(value) = range->kind == MemoryKind::kHost ? 1 : 2;
  } else if (attribute == kOrdinal) {
    *static_cast<int*>(value) = range->device;
  } else {
    return kNotSupported;
  }
  return kSuccess;
}

API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  ENTER();
  const auto range = machine().memory().find(reinterpret_cast<void*>(from));
  if (!range || range->kind != MemoryKind::kDevice) {
    return kInvalidValue;
  }
  return machine().copy({to, reinterpret_cast<void*>(from), bytes}, stream, /*blocking=*/false);
}
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  ENTER();
  const auto range = machine().memory().find(reinterpret_cast<void*>(to));
  if (!range || range->kind != MemoryKind::kDevice) {
    return kInvalidValue;
  }
  return machine().copy({reinterpret_cast<void*>(to), from, bytes}, stream, /*blocking=*/false);
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  ENTER();
  for (const uint64_t address : {to, from}) {
    const auto range = machine().memory().find(reinterpret_cast<void*>(address));
    if (!range || range->kind != MemoryKind::kDevice) {
      return kInvalidValue;
    }
  }
  return machine().copy({reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes}, stream,
                        /*blocking=*/false);
}
API int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) {
  ENTER();
  return machine().fill(reinterpret_cast<void*>(to), value, sizeof(value), count, stream,
                        /*blocking=*/false);
}
API int cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void* stream) {
  ENTER();
  return machine().fill(reinterpret_cast<void*>(to), value, 1, count, stream, /*blocking=*/false);
}

API int cuStreamCreate(void** stream, unsigned flags) {
  ENTER();
  return machine().createStream(flags, kLowestPriority, stream);
}
API int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  ENTER();
  return machine().createStream(flags, std::clamp(priority, kHighestPriority, kLowestPriority),
                                stream);
}
API int cuStreamDestroy_v2(void* stream) {
  ENTER();
  return machine().destroyStream(stream);
}
API int cuStreamGetPriority(void* stream, int* priority) {
  ENTER();
  const auto asked = machine().stream(stream);
  *priority = asked == nullptr ? 0 : asked->priority;
  return asked == nullptr ? kInvalidHandle : kSuccess;
}
API int cuStreamSynchronize(void* stream) {
  ENTER();
  return machine().synchronizeStream(stream);
}
API int cuStreamQuery(void* stream) {
  ENTER();
  return machine().queryStream(stream);
}
API int cuStreamWaitEvent(void* stream, void* event, unsigned /*flags*/) {
  ENTER();
  return machine().waitFor(stream, event);
}
API int cuStreamWriteValue32_v2(void* stream, uint64_t to, uint32_t value, unsigned /*flags*/) {
  ENTER();
  auto* const address = reinterpret_cast<void*>(to);
  if (to % sizeof(value) != 0 || !machine().memory().contains(address, sizeof(value))) {
    return kInvalidValue;
  }
  auto* const at = reinterpret_cast<std::atomic<uint32_t>*>(machine().memory().shadow(address));
  return machine().enqueue(stream, [at, value] { at->store(value, std::memory_order_release); });
}
API int cuStreamBeginCapture_v2(void* stream, int mode) {
  ENTER();
  return machine().beginCapture(stream, mode);
}
API int cuStreamEndCapture(void* stream, void** graph) {
  ENTER();
  return machine().endCapture(stream, reinterpret_cast<Graph**>(graph));
}
API int cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t /*flags*/) {
  ENTER();
  *executable = new Graph(*static_cast<Graph*>(graph));
  return kSuccess;
}
API int cuGraphLaunch(void* executable, void* stream) {
  ENTER();
  return machine().launchGraph(*static_cast<Graph*>(executable), stream);
}
API int cuGraphExecDestroy(void* executable) {
  ENTER();
  delete static_cast<Graph*>(executable);
  return kSuccess;
}
API int cuGraphDestroy(void* graph) {
  ENTER();
  delete static_cast<Graph*>(graph);
  return kSuccess;
}
API int cuStreamIsCapturing(void* stream, int* status) {
  ENTER();
  return machine().captureStatus(stream, status, nullptr);
}
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER();
  *mode = machine().exchangeMode(*mode);
  return kSuccess;
}

API int cuEventCreate(void** event, unsigned flags) {
  ENTER();
  return machine().createEvent(flags, event);
}
API int cuEventDestroy_v2(void* event) {
  ENTER();
  return machine().destroyEvent(event);
}
API int cuEventRecord(void* event, void* stream) {
  ENTER();
  return machine().record(event, stream);
}
API int cuEventRecordWithFlags(void* event, void* stream, unsigned /*flags*/) {
  ENTER();
  return machine().record(event, stream);
}
API int cuEventQuery(void* event) {
  ENTER();
  return machine().query(event);
}
API int cuEventElapsedTime(float* ms, void* begin, void* end) {
  ENTER();
  return machine().elapsed(begin, end, ms);
}
API int cuEventSynchronize(void* event) {
  ENTER();
  return machine().synchronizeEvent(event);
}

// Loading allocates memory of the device: during a capture it is as unsafe as that.
API int cuModuleLoadData(void** module, const void* image) {
  ENTER();
  if (Machine::current() < 0) {
    return kInvalidContext;
  }
  if (const Result result = machine().unsafeCall(); result != kSuccess) {
    return result;
  }
  if (image == nullptr) {
    return kInvalidValue;
  }
  // A binary image is no PTX from its first bytes on, and has a zero soon.
  PtxModule content;
  const Result result = PtxModule::parse(static_cast<const char*>(image), &content, &t_refusal);
  *module = result == kSuccess ? modules().add(std::move(content), Machine::current()) : nullptr;
  return result;
}
API int cuModuleUnload(void* module) {
  ENTER();
  if (const Result result = machine().unsafeCall(); result != kSuccess) {
    return result;
  }
  return modules().remove(module) ? kSuccess : kInvalidHandle;  // launches keep what they run
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER();
  *function = nullptr;
  return name == nullptr ? kInvalidValue : modules().function(module, name, function);
}
API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z,
                       unsigned /*shared_bytes*/, void* stream, void** arguments, void** extra) {
  ENTER();
  if (Machine::current() < 0) {
    return kInvalidContext;
  }
  if (namedKernels().find(function) != nullptr) {
    return machine().enqueueKernel(
        stream, arguments == nullptr ? Work() : std::move(*static_cast<Work*>(arguments[0])));
  }
  const auto loaded = modules().find(function);
  const StreamPtr on = machine().stream(stream);
  if (loaded.kernel == nullptr || on == nullptr || on->device != loaded.device) {
    return kInvalidHandle;
  }
  const std::vector<size_t>& parameters = loaded.kernel->parameters();
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > kMostThreads ||
      block_y != 1 || block_z != 1 || (arguments == nullptr && !parameters.empty())) {
    return kInvalidValue;
  }
  if (extra != nullptr) {
    return kNotSupported;
  }
  std::vector<uint64_t> values(parameters.size());  // the program may reuse its own at once
  for (size_t i = 0; i < values.size(); ++i) {
    std::memcpy(&values[i], arguments[i], parameters[i]);
  }
  return machine().enqueueKernel(stream, [kernel = loaded.kernel, grid = PtxGrid{grid_x, block_x},
                                          values = std::move(values), device = loaded.device] {
    const Result result = kernel->run(grid, values, machine().memory(), device);
    if (result != kSuccess) {
      calls().stick(result);
    }
  });
}

struct LaunchConfiguration {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
API int cuLaunchKernelEx(const void* configuration, void* function, void** arguments,
                         void** extra) {
  ENTER();
  const auto& with = *static_cast<const LaunchConfiguration*>(configuration);
  return cuLaunchKernel(function, with.grid_x, with.grid_y, with.grid_z, with.block_x, with.block_y,
                        with.block_z, with.shared_bytes, with.stream, arguments, extra);
}
// One handle serves as CUfunction and as CUkernel, as a launch takes both.
API int cuFuncGetName(const char** name, void* function) {
  COUNT(false);
  *name = namedKernels().find(function);
  if (*name == nullptr) {
    const auto loaded = modules().find(function);
    *name = loaded.kernel == nullptr ? nullptr : loaded.kernel->name().c_str();
  }
  return *name == nullptr ? kInvalidHandle : kSuccess;
}

// Linked by libcaffe2_nvrtc.so.
#define UNSUPPORTED(name) \
  API int name(...) {     \
    ENTER();              \
    return kNotSupported; \
  }
UNSUPPORTED(cuFuncGetAttribute)
UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuFuncSetCacheConfig)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuTensorMapEncodeTiled)

// -- controls
// ---------------------------------------------------------------------------------------------------------------

API void fake_cuda_set_copy_rate(uint64_t bytes_per_sec) {
  machine().setCopyRate(bytes_per_sec);
}
API void fake_cuda_set_kernel_us(uint64_t us) {
  machine().setKernelUs(us);
}
API void fake_cuda_set_contention(unsigned percent) {
  machine().setContention(percent);
}
API void fake_cuda_set_jitter(uint64_t max_us, uint64_t seed) {
  machine().setJitter(max_us, seed);
}
API void fake_cuda_hold(int on) {
  machine().hold(on != 0);
}
API void fake_cuda_fail(const char* function, uint64_t after, int code, int sticky) {
  calls().fail(function, after, code, sticky != 0);
}
API void fake_cuda_heal(void) {
  calls().heal();
  machine().memory().forgetRegistered();
}
API uint64_t fake_cuda_calls(const char* function) {
  return calls().count(function);
}
API uint64_t fake_cuda_contexts(void) {
  return machine().contexts();
}
API void* fake_cuda_shadow(const void* address) {
  return machine().memory().shadow(address);
}
API const char* fake_cuda_refusal(void) {
  return t_refusal.c_str();
}
API void fake_cuda_add_kernel(const void* handle, const char* name) {
  namedKernels().add(handle, name);
}
API int fake_cuda_launch(void* stream, void (*function)(void*), void* argument) {
  return machine().enqueueKernel(stream, [function, argument] { function(argument); });
}
