// The backends of this process that live, for ending them all when the job is given up.
//
// Threads: all functions from any; removeLiveBackend() waits while abortBackends() runs.
// Errors:  abortBackends() swallows those of the backends: the process ends next.
#pragma once

#include <functional>

namespace reft {

void addLiveBackend(const void* backend, std::function<void()> abort);
void removeLiveBackend(const void* backend);
// Aborts all; takes no GIL. May block: an inner backend may wait for its device.
void abortBackends();

}  // namespace reft
