#include "c10d_backend/live_backends.h"

#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "intercept/base/log.h"

namespace reft {

namespace {

struct Live {
  std::mutex mutex;
  std::map<const void*, std::function<void()>> backends;
};

Live& live() {
  static auto* const made = new Live;  // never destroyed: backends may outlive static objects
  return *made;
}

}  // namespace

void addLiveBackend(const void* backend, std::function<void()> abort) {
  const std::lock_guard<std::mutex> lock(live().mutex);
  live().backends[backend] = std::move(abort);
}

void removeLiveBackend(const void* backend) {
  const std::lock_guard<std::mutex> lock(live().mutex);
  live().backends.erase(backend);
}

void abortBackends() {
  const std::lock_guard<std::mutex> lock(live().mutex);
  for (const auto& [backend, abort] : live().backends) {
    try {
      abort();
    } catch (const std::exception& error) {
      logDebug("backend", "not aborted: ", error.what());
    }
  }
}

}  // namespace reft
