#include "hang_detect/rank/thrown.h"

#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <typeinfo>

namespace reft {

namespace {

// Static: the process has no order any more when it is read.
struct Kept {
  std::atomic<bool> claimed{false};
  std::atomic<pid_t> whole_in{0};  // the process; 0: not whole
  char type[256] = {};
  char message[4096] = {};
};
Kept kept;
std::terminate_handler before = nullptr;

template <size_t kSize>
void put(char (&to)[kSize], const char* text) {
  const size_t count = std::min(std::strlen(text), kSize - 1);
  std::memcpy(to, text, count);
  to[count] = 0;
}

void keepType() {
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (type == nullptr) {
    return;
  }
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, &status), &std::free);
  put(kept.type, status == 0 && name != nullptr ? name.get() : type->name());
}

[[noreturn]] void onTerminate() {
  // Another thread may throw meanwhile, and so may what().
  if (std::current_exception() != nullptr && !kept.claimed.exchange(true)) {
    keepType();
    try {
      throw;
    } catch (const std::exception& error) {
      put(kept.message, error.what());
    } catch (...) {  // NOLINT(bugprone-empty-catch): it has no message
    }
    kept.whole_in.store(::getpid(), std::memory_order_release);
  }
  if (before != nullptr) {
    before();
  }
  std::abort();
}

}  // namespace

void keepThrown() {
  static const bool once = [] {
    before = std::set_terminate(&onTerminate);
    return true;
  }();
  static_cast<void>(once);
}

Thrown thrown() {
  if (kept.whole_in.load(std::memory_order_acquire) != ::getpid()) {
    return {};
  }
  return {kept.type, kept.message};
}

}  // namespace reft
