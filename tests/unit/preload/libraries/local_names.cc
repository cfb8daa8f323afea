// Opened with RTLD_LOCAL: RTLD_DEFAULT finds its names for itself alone.
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))

API int local_name() {
  return 7;
}
API void* local_default(const char* name) {
  void* volatile found = ::dlsym(RTLD_DEFAULT, name);  // no jump: it is this library that asks
  return found;
}
