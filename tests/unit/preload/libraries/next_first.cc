// Comes before next_second.cc in the order of lookup, and asks for the definition after its own.
#include <dlfcn.h>

extern "C" __attribute__((visibility("default"))) int next_number() {
  const auto next = reinterpret_cast<int (*)()>(::dlsym(RTLD_NEXT, "next_number"));
  return next == nullptr ? -1 : 10 + next();
}
// By version: next_second.cc has none, so that any will do.
extern "C" __attribute__((visibility("default"))) int next_number_of_version() {
  const auto next = reinterpret_cast<int (*)()>(::dlvsym(RTLD_NEXT, "next_number", "ANY_1"));
  return next == nullptr ? -1 : 10 + next();
}
