#include "intercept/hooks/driver_exports.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "intercept/hooks/driver_hooks.h"
#include "intercept/hooks/loaded_objects.h"
#include "intercept/hooks/observer.h"
#include "intercept/record/driver_calls.h"

namespace reft::hooks {

namespace {

constexpr int kNoLibrary = 303;  // CUDA_ERROR_SHARED_OBJECT_INIT_FAILED

// The real function; nullptr in a process that has none, which may still load one.
void* realOf(std::atomic<void*>& orig, const char* symbol) {
  void* real = orig.load(std::memory_order_acquire);
  if (real == nullptr) {
    arm();
    real = nextDefinition(symbol);
    orig.store(real, std::memory_order_release);
  }
  return real;
}

// link_ is what the exported name stands for: a name of its own, as the program may define the
// exported one itself.
#define REFT_LINK(name, call, kind, object, parameters, arguments)                               \
  std::atomic<void*> linked_##name;                                                              \
  extern "C" __attribute__((visibility("hidden"))) int reft_link_##name parameters {             \
    const auto orig = reinterpret_cast<int(*) parameters>(realOf(linked_##name, #name));         \
    if (orig == nullptr) {                                                                       \
      return kNoLibrary;                                                                         \
    }                                                                                            \
    const Observed observed(DriverCall::call, CallKind::kind, static_cast<const void*>(object)); \
    return orig arguments;                                                                       \
  }                                                                                              \
  extern "C" __attribute__((visibility("default"), alias("reft_link_" #name))) int name parameters;
#define REFT_ONE(symbol, base, kind, since, before, object, parameters, arguments) \
  REFT_LINK(symbol, symbol, kind, object, parameters, arguments)
#define REFT_TWO(symbol, twin, base, kind, since, before, object, parameters, arguments) \
  REFT_LINK(symbol, symbol, kind, object, parameters, arguments)                         \
  REFT_LINK(twin, symbol, kind, object, parameters, arguments)
REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)
#undef REFT_ONE
#undef REFT_TWO
#undef REFT_LINK

std::atomic<void*> linked_cuGetProcAddress;
extern "C" __attribute__((visibility("hidden"))) int reft_link_cuGetProcAddress(const char* symbol,
                                                                                void** function,
                                                                                int version,
                                                                                uint64_t flags) {
  const auto orig = reinterpret_cast<int (*)(const char*, void**, int, uint64_t)>(
      realOf(linked_cuGetProcAddress, "cuGetProcAddress"));
  return orig == nullptr
             ? kNoLibrary
             : handOut(symbol, version, orig(symbol, function, version, flags), function);
}
std::atomic<void*> linked_cuGetProcAddress_v2;
extern "C" __attribute__((visibility("hidden"))) int reft_link_cuGetProcAddress_v2(
    const char* symbol, void** function, int version, uint64_t flags, void* found) {
  const auto orig = reinterpret_cast<int (*)(const char*, void**, int, uint64_t, void*)>(
      realOf(linked_cuGetProcAddress_v2, "cuGetProcAddress_v2"));
  return orig == nullptr
             ? kNoLibrary
             : handOut(symbol, version, orig(symbol, function, version, flags, found), function);
}
extern "C" __attribute__((visibility("default"), alias("reft_link_cuGetProcAddress"))) int
cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags);
extern "C" __attribute__((visibility("default"), alias("reft_link_cuGetProcAddress_v2"))) int
cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, void* found);

}  // namespace

bool isExport(const void* function) {
#define REFT_SAME(name)                                               \
  if (function == reinterpret_cast<const void*>(&reft_link_##name)) { \
    return true;                                                      \
  }
#define REFT_ONE(symbol, ...) REFT_SAME(symbol)
#define REFT_TWO(symbol, twin, ...) REFT_SAME(symbol) REFT_SAME(twin)
  REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)
  REFT_SAME(cuGetProcAddress)
  REFT_SAME(cuGetProcAddress_v2)
#undef REFT_ONE
#undef REFT_TWO
#undef REFT_SAME
  return false;
}

}  // namespace reft::hooks
