#include "intercept/driver/dynamic_library.h"

#include <dlfcn.h>

#include <utility>

namespace reft {

DynamicLibrary DynamicLibrary::open(std::initializer_list<const char*> names) {
  DynamicLibrary library;
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : names) {
      library.handle_ = ::dlopen(name, flags);
      if (library.handle_ != nullptr) {
        library.why_.clear();
        return library;
      }
      if ((flags & RTLD_NOLOAD) == 0) {
        const char* error = ::dlerror();
        library.why_ +=
            (library.why_.empty() ? "" : "; ") + std::string(error == nullptr ? name : error);
      }
    }
  }
  return library;
}

DynamicLibrary DynamicLibrary::absent(std::string why) {
  DynamicLibrary library;
  library.why_ = std::move(why);
  return library;
}

void* DynamicLibrary::find(const char* symbol) const {
  return handle_ == nullptr ? nullptr : ::dlsym(handle_, symbol);
}

}  // namespace reft
