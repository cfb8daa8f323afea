// cuGetProcAddress() of the stand-in, and the functions that only it, or a program for per-thread
// default streams, asks for: other versions, and the twins whose stream 0 is that of the thread.
//
// As in the driver, a name stands for the newest ABI that the asker's version knows.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/control.h"
#include "tests/fakes/cuda/results.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace reft::fake;

// Defined in driver.cc.
#define LAUNCH                                                                                \
  (void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,       \
   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, \
   void** extra)
API int cuLaunchKernel LAUNCH;
API int cuLaunchKernelEx(const void*, void*, void**, void**);
API int cuGraphLaunch(void*, void*);
API int cuMemcpyHtoDAsync_v2(uint64_t, const void*, size_t, void*);
API int cuMemcpyDtoHAsync_v2(void*, uint64_t, size_t, void*);
API int cuStreamSynchronize(void*);
API int cuEventRecord(void*, void*);
API int cuEventRecordWithFlags(void*, void*, unsigned);
API int cuEventSynchronize(void*);
API int cuCtxSynchronize();
API int cuCtxSynchronize_v2(void*);

namespace {

constexpr uint64_t kPerThreadStreams = 2;  // of the flags

void* perThread(void* stream) {
  return stream == nullptr ? reinterpret_cast<void*>(2) : stream;
}

}  // namespace

API int cuLaunchKernel_ptsz LAUNCH {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                        perThread(stream), arguments, extra);
}
API int cuLaunchKernelEx_ptsz(const void* configuration, void* function, void** arguments,
                              void** extra) {
  return cuLaunchKernelEx(configuration, function, arguments, extra);
}
API int cuGraphLaunch_ptsz(void* executable, void* stream) {
  return cuGraphLaunch(executable, perThread(stream));
}
API int cuMemcpyHtoDAsync_v2_ptsz(uint64_t to, const void* from, size_t bytes, void* stream) {
  return cuMemcpyHtoDAsync_v2(to, from, bytes, perThread(stream));
}
API int cuMemcpyDtoHAsync_v2_ptsz(void* to, uint64_t from, size_t bytes, void* stream) {
  return cuMemcpyDtoHAsync_v2(to, from, bytes, perThread(stream));
}
API int cuStreamSynchronize_ptsz(void* stream) {
  return cuStreamSynchronize(perThread(stream));
}
API int cuEventRecord_ptsz(void* event, void* stream) {
  return cuEventRecord(event, perThread(stream));
}
API int cuEventRecordWithFlags_ptsz(void* event, void* stream, unsigned flags) {
  return cuEventRecordWithFlags(event, perThread(stream), flags);
}
// Of the time when device addresses had 32 bits.
API int cuMemcpyHtoDAsync(uint32_t, const void*, uint32_t, void*) {
  return kNotSupported;
}
API int cuKernelGetName(const char** name, void*) {
  *name = nullptr;
  return kInvalidHandle;  // cuFuncGetName knows all handles of the stand-in
}
API int cuGetProcAddress(const char*, void**, int, uint64_t);
API int cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);

namespace {

std::atomic<bool> thunks{false};

int thunkOfLaunch LAUNCH {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                        stream, arguments, extra);
}
int thunkOfSynchronize(void* stream) {
  return cuStreamSynchronize(stream);
}

struct EntryPoint {
  const char* name;
  int since;
  void* legacy;
  void* per_thread;  // nullptr: the same
  void* thunk;       // nullptr: none
};

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

// Versions of a name from the oldest on.
const EntryPoint* entryPoints(size_t* count) {
  static const EntryPoint kAll[] = {
      {"cuLaunchKernel", 4000, address(cuLaunchKernel), address(cuLaunchKernel_ptsz),
       address(thunkOfLaunch)},
      {"cuLaunchKernelEx", 11060, address(cuLaunchKernelEx), address(cuLaunchKernelEx_ptsz),
       nullptr},
      {"cuGraphLaunch", 10000, address(cuGraphLaunch), address(cuGraphLaunch_ptsz), nullptr},
      {"cuMemcpyHtoDAsync", 2000, address(cuMemcpyHtoDAsync), nullptr, nullptr},
      {"cuMemcpyHtoDAsync", 3020, address(cuMemcpyHtoDAsync_v2), address(cuMemcpyHtoDAsync_v2_ptsz),
       nullptr},
      {"cuMemcpyDtoHAsync", 3020, address(cuMemcpyDtoHAsync_v2), address(cuMemcpyDtoHAsync_v2_ptsz),
       nullptr},
      {"cuStreamSynchronize", 2000, address(cuStreamSynchronize), address(cuStreamSynchronize_ptsz),
       address(thunkOfSynchronize)},
      {"cuEventRecord", 2000, address(cuEventRecord), address(cuEventRecord_ptsz), nullptr},
      {"cuEventRecordWithFlags", 11010, address(cuEventRecordWithFlags),
       address(cuEventRecordWithFlags_ptsz), nullptr},
      {"cuEventSynchronize", 2000, address(cuEventSynchronize), nullptr, nullptr},
      {"cuCtxSynchronize", 2000, address(cuCtxSynchronize), nullptr, nullptr},
      {"cuCtxSynchronize", 13000, address(cuCtxSynchronize_v2), nullptr, nullptr},
      {"cuGetProcAddress", 11030, address(cuGetProcAddress), nullptr, nullptr},
      {"cuGetProcAddress", 12000, address(cuGetProcAddress_v2), nullptr, nullptr},
  };
  *count = sizeof(kAll) / sizeof(kAll[0]);
  return kAll;
}

// What is exported under the name, or under its second version; the driver's own table is longer.
void* exported(const char* name) {
  Dl_info self;
  void* const library = ::dladdr(address(exported), &self) == 0
                            ? nullptr
                            : ::dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return nullptr;
  }
  void* found = ::dlsym(library, (std::string(name) + "_v2").c_str());
  found = found == nullptr ? ::dlsym(library, name) : found;
  ::dlclose(library);
  return found;
}

enum Found { kFound = 0, kUnknown = 1, kTooNew = 2 };  // CUdriverProcAddressQueryResult

Found find(const char* name, int version, uint64_t flags, void** function) {
  size_t count = 0;
  const EntryPoint* const all = entryPoints(&count);
  bool known = false;
  *function = nullptr;
  for (const EntryPoint* entry = all; entry != all + count; ++entry) {
    if (std::strcmp(entry->name, name) != 0) {
      continue;
    }
    known = true;
    if (entry->since <= version) {
      const bool twin = flags == kPerThreadStreams && entry->per_thread != nullptr;
      *function = twin ? entry->per_thread : entry->legacy;
      if (!twin && thunks.load() && entry->thunk != nullptr) {
        *function = entry->thunk;
      }
    }
  }
  if (!known) {
    *function = exported(name);
    known = *function != nullptr;
  }
  return *function != nullptr ? kFound : known ? kTooNew : kUnknown;
}

}  // namespace

API int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                            int* status) {
  if (const Result entered = calls().enter(__func__, false); entered != kSuccess) {
    return entered;
  }
  if (name == nullptr || function == nullptr) {
    return kInvalidValue;
  }
  const Found found = find(name, version, flags, function);
  if (status != nullptr) {
    *status = found;
  }
  return found == kFound ? kSuccess : kNotFound;
}
API int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

API void fake_cuda_set_thunks(int on) {
  thunks.store(on != 0);
}
