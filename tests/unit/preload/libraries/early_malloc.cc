// An allocator that looks functions up inside its first malloc, as jemalloc does: a dlsym that
// allocates would call itself without end.
#include <dlfcn.h>

#include <cstddef>

namespace {

using Malloc = void* (*)(size_t);
using Free = void (*)(void*);
Malloc next_malloc = nullptr;
Free next_free = nullptr;
int depth = 0;  // the first calls come from the loader's only thread

}  // namespace

extern "C" __attribute__((visibility("default"))) void* malloc(size_t bytes) {
  if (next_malloc == nullptr) {
    if (++depth > 1) {
      __builtin_trap();
    }
    next_malloc = reinterpret_cast<Malloc>(::dlsym(RTLD_NEXT, "malloc"));
  }
  return next_malloc(bytes);
}

extern "C" __attribute__((visibility("default"))) void free(void* memory) {
  if (next_free == nullptr) {
    next_free = reinterpret_cast<Free>(::dlsym(RTLD_NEXT, "free"));
  }
  next_free(memory);
}
