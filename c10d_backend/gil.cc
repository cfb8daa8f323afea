#include "c10d_backend/gil.h"

#include <atomic>

namespace reft {

namespace {

std::atomic<GilReleaser> releaser_of_process{nullptr};

}  // namespace

void setGilReleaser(GilReleaser releaser) noexcept {
  releaser_of_process.store(releaser, std::memory_order_release);
}

void runWithoutGil(void (*body)(void*), void* argument) noexcept {
  if (const GilReleaser release = releaser_of_process.load(std::memory_order_acquire)) {
    release(body, argument);
  } else {
    body(argument);
  }
}

}  // namespace reft
