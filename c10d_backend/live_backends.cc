#include "c10d_backend/live_backends.h"

#include <exception>
#include <map>
#include <utility>

#include "intercept/base/log.h"
#include "intercept/base/mutex.h"

namespace reft {

namespace {

struct Live {
  Mutex mutex;
  std::map<const void*, std::function<void()>> backends GUARDED_BY(mutex);
};

Live& live() {
  static auto* const made = new Live;  // never destroyed: backends may outlive static objects
  return *made;
}

}  // namespace

void addLiveBackend(const void* backend, std::function<void()> abort) {
  Live& all = live();
  const MutexLock lock(all.mutex);
  all.backends[backend] = std::move(abort);
}

void removeLiveBackend(const void* backend) {
  Live& all = live();
  const MutexLock lock(all.mutex);
  all.backends.erase(backend);
}

void abortBackends() {
  Live& all = live();
  const MutexLock lock(all.mutex);
  for (const auto& [backend, abort] : all.backends) {
    try {
      abort();
    } catch (const std::exception& error) {
      logDebug("backend", "not aborted: ", error.what());
    }
  }
}

}  // namespace reft
