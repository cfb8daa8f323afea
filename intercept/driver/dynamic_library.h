// A library that may be absent, and its functions.
//
// Threads: any. Errors: none; why() explains an absent library, and find() returns nullptr.
#pragma once

#include <initializer_list>
#include <string>

namespace reft {

class DynamicLibrary {
 public:
  // Opens the first of `names` that the process has loaded, else the first that loads (RTLD_LOCAL).
  // The library is never unloaded.
  static DynamicLibrary open(std::initializer_list<const char*> names);
  // A library that is absent for the given reason.
  static DynamicLibrary absent(std::string why);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& why() const { return why_; }  // empty if the library is open
  void* find(const char* symbol) const;            // nullptr if absent

 private:
  void* handle_ = nullptr;
  std::string why_;
};

}  // namespace reft
