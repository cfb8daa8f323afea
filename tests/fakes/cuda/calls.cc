#include "tests/fakes/cuda/calls.h"

namespace reft::fake {

Result Calls::enter(const char* function, bool in_context) {
  const std::string_view name(function);
  const std::lock_guard lock(mutex_);
  auto counted = counts_.find(name);
  if (counted == counts_.end()) {
    counted = counts_.emplace(name, 0).first;
  }
  ++counted->second;
  if (const auto found = failures_.find(name);
      found != failures_.end() && --found->second.after == 0) {
    const Failure failure = found->second;
    failures_.erase(found);
    failed_.store(true);
    if (failure.sticky) {
      stuck_.store(failure.result);
    }
    return failure.result;
  }
  return in_context ? stuck_.load() : kSuccess;
}

void Calls::fail(const std::string& function, uint64_t after, Result result, bool sticky) {
  const std::lock_guard lock(mutex_);
  failures_.insert_or_assign(function, Failure{after == 0 ? 1 : after, result, sticky});
}

void Calls::heal() {
  const std::lock_guard lock(mutex_);
  failures_.clear();
  stuck_.store(kSuccess);
}

uint64_t Calls::count(const std::string& function) const {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find(function);
  return found == counts_.end() ? 0 : found->second;
}

Calls& calls() {
  static Calls* const one = new Calls;
  return *one;
}

}  // namespace reft::fake
