// What differs between the supported torch versions (2.11 … 2.15), in one place.
//
// A function that only some versions have is declared in ReftBackend and ReftWork for all of them,
// with REFT_OVERRIDES_IF_NEW in place of `override`: where torch has the virtual, the declaration
// overrides it; elsewhere it has no caller. Its body reaches the inner backend through
// REFT_FORWARD, which throws where this torch lacks the function. Functions whose types are new are
// guarded by torch's own feature macros.
//
// Threads, Errors: none of its own.
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#define REFT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||       \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !REFT_TORCH_AT_LEAST(2, 11)
#error "reft needs torch 2.11 or newer"
#endif

// Documents that the function overrides a virtual of newer torch versions only.
#define REFT_OVERRIDES_IF_NEW

// Hooks for completed operations, with their types, came after the abort hooks
// (C10D_BACKEND_HAS_HOOKS).
#define REFT_TORCH_HAS_COMPLETION_HOOKS REFT_TORCH_AT_LEAST(2, 15)

namespace reft::compat_detail {

// The result of an absent function, of any type; absent() throws before it is used.
struct Absent {
  template <typename T>
  operator T() const {
    TORCH_INTERNAL_ASSERT(false);
  }
};

inline Absent absent(const char* name) {
  TORCH_CHECK(false, "torch ", TORCH_VERSION, " has no ", name);
}

template <typename T>
T* pointer(T* object) {
  return object;
}
template <typename T>
T* pointer(const c10::intrusive_ptr<T>& object) {
  return object.get();
}

}  // namespace reft::compat_detail

// Calls `object->name(…)` if this torch has the function, else throws.
#define REFT_FORWARD(object, name, ...)                           \
  [&](auto* reft_object) -> decltype(auto) {                      \
    if constexpr (requires { reft_object->name(__VA_ARGS__); }) { \
      return reft_object->name(__VA_ARGS__);                      \
    } else {                                                      \
      return ::reft::compat_detail::absent(#name);                \
    }                                                             \
  }(::reft::compat_detail::pointer(object))
