// A library that may be absent, and the functions that are taken from it.
//
// Threads: open() is thread-safe; a filled table is read-only. Errors: none; what is absent stays
// null and why() says why.
#pragma once

#include <initializer_list>
#include <string>

namespace reft {

class DynamicLibrary {
 public:
  // Takes the first of `names` that the process already has, else the first that can be loaded
  // (RTLD_LOCAL). The library is never unloaded.
  static DynamicLibrary open(std::initializer_list<const char*> names);
  // A library that is absent for the given reason.
  static DynamicLibrary absent(std::string why);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& why() const { return why_; }  // empty if it is there
  void* find(const char* symbol) const;            // nullptr if there is none

 private:
  void* handle_ = nullptr;
  std::string why_;
};

}  // namespace reft
