// Another library that replaces dlsym, as tools and GPU sharers do; preloaded before or after
// reft's. It counts the lookups that it sees.
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))

extern "C" {
__attribute__((visibility("default"))) int other_dlsym_calls = 0;
}

API void* dlsym(void* handle, const char* symbol) {
  using Dlsym = void* (*)(void*, const char*);
  static const auto next = reinterpret_cast<Dlsym>(::dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
  ++other_dlsym_calls;
  return next(handle, symbol);
}
