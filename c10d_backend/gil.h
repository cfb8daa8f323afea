// Lets destructors that may join threads run without the GIL, without this folder knowing Python.
//
// A thread that the destructor joins may want the GIL itself (to free a Python object held by a
// Work); whoever destroys a backend with the GIL held, as DDP's reducer does, would then wait for
// ever.
//
// Threads: any. Errors: none.
#pragma once

#include <atomic>

namespace reft {

// Calls `body(argument)`, with the GIL released if the calling thread holds it.
using GilReleaser = void (*)(void (*body)(void*), void* argument) noexcept;

extern std::atomic<GilReleaser> gil_releaser;

template <typename Body>
void withoutGil(Body body) noexcept {
  const auto call = [](void* argument) { (*static_cast<Body*>(argument))(); };
  if (const GilReleaser release = gil_releaser.load(std::memory_order_acquire)) {
    release(call, &body);
  } else {
    call(&body);
  }
}

}  // namespace reft
