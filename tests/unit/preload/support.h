// What the tests of the preloaded library share: libraries that use the driver in their own ways,
// kernels of the stand-in, and what was counted.
//
// Threads: one. Errors: a library that cannot be opened ends the test.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "intercept/record/device_activity.h"
#include "tests/fakes/cuda/driver.h"
#include "tests/unit/preload/libraries/static_runtime.h"

namespace reft::preload_test {

inline void* openLibrary(const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    std::abort();
  }
  return library;
}
inline void* openHelper(const std::string& name) {
  return openLibrary(std::string(REFT_PRELOAD_HELPERS) + "/" + name);
}

template <typename Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

// A kernel of the stand-in, whose device 0 is the thread's.
inline void* kernel(const char* name) {
  const FakeCuda& cuda = FakeCuda::instance();
  cuda::Context context = nullptr;
  cuda.api.devicePrimaryCtxRetain(&context, 0);
  cuda.api.ctxSetCurrent(context);
  char* const handle = new char;
  find<void (*)(const void*, const char*)>(::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD),
                                           "fake_cuda_add_kernel")(handle, name);
  return handle;
}

inline StaticRuntime& staticRuntime(const std::string& library, uint64_t flags) {
  return *find<StartRuntime>(openHelper(library), "static_runtime")(flags);
}

// Calls since the object was made.
class Counted {
 public:
  uint64_t operator()(CallKind kind) const {
    return readDeviceActivity().count(kind) - before_.count(kind);
  }
  uint64_t all() const {
    uint64_t sum = 0;
    for (size_t kind = 0; kind < kCallKinds; ++kind) {
      sum += (*this)(static_cast<CallKind>(kind));
    }
    return sum;
  }
  uint64_t unhooked() const { return readDeviceActivity().unhooked - before_.unhooked; }

 private:
  const DeviceActivity before_ = readDeviceActivity();
};

// Runs `body` in a forked child. It fails in the child: its text goes to standard error.
template <typename Body>
bool holdsInChild(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace reft::preload_test
