// Brackets the accesses to device memory that ThreadSanitizer may have to pass over.
//
// Once a call was made to fail, a stream may write what another still copies, as on a device: such
// a snapshot is dropped, and its values are what tests look at. ThreadSanitizer passes over the
// accesses within. Until then it reports streams that nothing orders.
//
// Threads: each thread brackets its own accesses. Errors: none.
#pragma once

#include "tests/fakes/cuda/calls.h"

#ifdef __SANITIZE_THREAD__
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace reft::fake {

class DeviceAccess {
 public:
#ifdef __SANITIZE_THREAD__
  DeviceAccess() {
    if (ignored_) {
      AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
      AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
  }
  ~DeviceAccess() {
    if (ignored_) {
      AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
      AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
  }

 private:
  const bool ignored_ = calls().haveFailed();
#else
  DeviceAccess() {}
  ~DeviceAccess() {}
#endif
 public:
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

}  // namespace reft::fake
