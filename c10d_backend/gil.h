// Lets destructors that may join threads run without the GIL; this folder does not know Python.
//
// A thread that the destructor joins may want the GIL itself, to free a Python object held by a
// Work. If the caller destroys a backend with the GIL held, as DDP's reducer does, it would wait
// forever.
//
// Threads: any. Errors: none.
#pragma once

namespace reft {

// Calls `body(argument)`, with the GIL released if the calling thread holds it.
using GilReleaser = void (*)(void (*body)(void*), void* argument) noexcept;

// The bindings set it once, before the first backend exists. Without it bodies run as they are.
void setGilReleaser(GilReleaser releaser) noexcept;

void runWithoutGil(void (*body)(void*), void* argument) noexcept;

template <typename Body>
void withoutGil(Body body) noexcept {
  runWithoutGil([](void* argument) { (*static_cast<Body*>(argument))(); }, &body);
}

}  // namespace reft
