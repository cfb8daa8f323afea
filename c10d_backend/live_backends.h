// The live backends of this process, to abort them all when the job is given up.
//
// Threads: all functions from any; removeLiveBackend() waits while abortBackends() runs.
// Errors:  abortBackends() logs those of the backends at debug: the process ends next.
#pragma once

#include <functional>

namespace reft {

void addLiveBackend(const void* backend, std::function<void()> abort);
void removeLiveBackend(const void* backend);
// Aborts all, without the GIL. May block: an inner backend may wait for its device.
void abortBackends();

}  // namespace reft
