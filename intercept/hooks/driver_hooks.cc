#include "intercept/hooks/driver_hooks.h"

#include <atomic>
#include <cstddef>

#include "intercept/hooks/driver_exports.h"
#include "intercept/hooks/loaded_objects.h"
#include "intercept/hooks/observer.h"
#include "intercept/record/driver_calls.h"

namespace reft::hooks {

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// Legacy and per-thread streams, of the driver and of one library that wraps it.
constexpr size_t kLanes = 4;

// For each row of driver_calls.h, in its order: orig_ is what hook_<lane> calls. A lane gets its
// function once, and keeps it.
#define REFT_ONE(symbol, base, kind, since, before, object, parameters, arguments)              \
  std::atomic<void*> orig_##symbol[kLanes];                                                     \
  template <size_t kLane>                                                                       \
  int hook_##symbol parameters {                                                                \
    const auto orig = reinterpret_cast<int(*) parameters>(orig_##symbol[kLane].load(kRelaxed)); \
    const Observed observed(DriverCall::symbol, CallKind::kind, REFT_OBJECT(object));           \
    return noted(orig arguments);                                                               \
  }
#define REFT_OBJECT(object) static_cast<const void*>(object)
#define REFT_TWO(symbol, twin, ...) REFT_ONE(symbol, __VA_ARGS__)
REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)
#undef REFT_ONE
#undef REFT_TWO
#undef REFT_OBJECT

// A program that looks cuGetProcAddress up by itself would get past the hooks with the real one.
std::atomic<void*> orig_cuGetProcAddress[kLanes];
template <size_t kLane>
int hook_cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  const auto orig = reinterpret_cast<int (*)(const char*, void**, int, uint64_t)>(
      orig_cuGetProcAddress[kLane].load(kRelaxed));
  const int result = orig(symbol, function, version, flags);
  return handOut(symbol, version, result, function);
}
std::atomic<void*> orig_cuGetProcAddress_v2[kLanes];
template <size_t kLane>
int hook_cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags,
                             void* found) {
  const auto orig = reinterpret_cast<int (*)(const char*, void**, int, uint64_t, void*)>(
      orig_cuGetProcAddress_v2[kLane].load(kRelaxed));
  const int result = orig(symbol, function, version, flags, found);
  return handOut(symbol, version, result, function);
}

struct Row {
  const char* symbol;
  const char* twin;  // nullptr: none
  const char* base;
  int since;
  int before;
  std::atomic<void*>* origs;
  void* hooks[kLanes];
};

#define REFT_ROW(symbol, twin, base, since, before)                                              \
  {                                                                                              \
#symbol, twin, base, since, before, orig_##symbol, {                                         \
      reinterpret_cast<void*>(&hook_##symbol<0>), reinterpret_cast<void*>(&hook_##symbol<1>),    \
          reinterpret_cast<void*>(&hook_##symbol<2>), reinterpret_cast<void*>(&hook_##symbol<3>) \
    }                                                                                            \
  }
#define REFT_ONE(symbol, base, kind, since, before, ...) \
  REFT_ROW(symbol, nullptr, base, since, before),
#define REFT_TWO(symbol, twin, base, kind, since, before, ...) \
  REFT_ROW(symbol, #twin, base, since, before),
const Row kRows[] = {
    REFT_DRIVER_CALLS(REFT_ONE, REFT_TWO)  //
    REFT_ROW(cuGetProcAddress, nullptr, "cuGetProcAddress", 11030, 12000),
    REFT_ROW(cuGetProcAddress_v2, nullptr, "cuGetProcAddress", 12000, 14000),
};
#undef REFT_ONE
#undef REFT_TWO
#undef REFT_ROW
static_assert(kLanes == 4, "REFT_ROW lists the lanes");

bool isIn(const Row& row, const char* symbol) {
  return equal(symbol, row.symbol) || (row.twin != nullptr && equal(symbol, row.twin));
}

void* hookOf(const Row& row, void* real) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    void* taken = row.origs[lane].load(std::memory_order_acquire);
    if (taken == nullptr) {
      if (row.origs[lane].compare_exchange_strong(taken, real, std::memory_order_acq_rel)) {
        activity.hooked.fetch_add(1, kRelaxed);
        taken = real;
      }
    }
    if (taken == real) {
      return row.hooks[lane];
    }
  }
  activity.unhooked.fetch_add(1, kRelaxed);
  return real;
}

}  // namespace

bool isHooked(const char* symbol) {
  if (symbol == nullptr || symbol[0] != 'c' || symbol[1] != 'u' || symbol[2] < 'A' ||
      symbol[2] > 'Z') {
    return false;
  }
  for (const Row& row : kRows) {
    if (isIn(row, symbol)) {
      return true;
    }
  }
  return false;
}

bool isOurs(const void* function) {
  for (const Row& row : kRows) {
    for (const void* hook : row.hooks) {
      if (hook == function) {
        return true;
      }
    }
  }
  return isExport(function);
}

void* hookOfSymbol(const char* symbol, void* real) {
  if (real == nullptr || isOurs(real) || !arm()) {
    return real;
  }
  for (const Row& row : kRows) {
    if (isIn(row, symbol)) {
      return hookOf(row, real);
    }
  }
  return real;
}

void* hookOfName(const char* name, int version, void* real) {
  const Row* of_version = nullptr;
  bool known = false;
  for (const Row& row : kRows) {
    if (!equal(name, row.base)) {
      continue;
    }
    if (!known && (isOurs(real) || !arm())) {
      return real;
    }
    known = true;
    // The driver says by the address which ABI it has chosen; the version says which it should.
    const char* const symbols[] = {row.symbol, row.twin};
    void* found[2] = {nullptr, nullptr};
    definitionsInObjectOf(real, symbols, found, 2);
    if (found[0] == real || found[1] == real) {
      return hookOf(row, real);
    }
    if (row.since <= version && version < row.before) {
      of_version = &row;
    }
  }
  if (of_version != nullptr) {
    return hookOf(*of_version, real);
  }
  activity.unhooked.fetch_add(known ? 1 : 0, kRelaxed);
  return real;
}

int handOut(const char* name, int version, int result, void** function) {
  if (result == 0 && name != nullptr && function != nullptr && *function != nullptr) {
    *function = hookOfName(name, version, *function);
  }
  return result;
}

}  // namespace reft::hooks
