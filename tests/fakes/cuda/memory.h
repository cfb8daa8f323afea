// Memory of the stand-in devices, and host memory that is registered with them.
//
// A device allocation is a memfd that is mapped twice: at the address that the user gets nothing
// may be read or written, so that a host access to a device pointer faults as it does on a GPU; the
// stand-in itself works through the second mapping.
//
// Threads: any. Errors: result codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "tests/fakes/cuda/results.h"

namespace reft::fake {

enum class MemoryKind { kDevice, kHost };

struct Range {
  char* base = nullptr;  // as the user knows it
  size_t bytes = 0;
  char* shadow = nullptr;  // where the stand-in reads and writes; base for host memory
  MemoryKind kind = MemoryKind::kHost;
  int device = 0;
  int fd = -1;
  bool counted = false;  // against the device's memory
};

class Memory {
 public:
  explicit Memory(int devices, size_t bytes_per_device);

  Result allocate(int device, size_t bytes, void** address);
  // Maps memory of another process, as CUDA IPC does.
  Result import(int device, int fd, size_t bytes, void** address);
  Result free(void* address);
  // Pinned memory: allocated here, or the user's.
  Result allocateHost(size_t bytes, void** address);
  Result freeHost(void* address);
  Result registerHost(void* address, size_t bytes, int device);
  Result unregisterHost(void* address);
  void forgetRegistered();

  std::optional<Range> find(const void* address) const;
  // Where the stand-in may access `address`; itself if no range is known.
  char* shadow(const void* address) const;
  bool contains(const void* address, size_t bytes) const;  // one range holds all of it
  size_t used(int device) const;
  size_t total() const { return total_; }

 private:
  Result map(int device, int fd, size_t bytes, bool counted, void** address);
  const Range* findLocked(const void* address) const;

  mutable std::mutex mutex_;
  std::map<char*, Range> ranges_;  // by base
  std::map<int, size_t> used_;
  size_t total_;
};

}  // namespace reft::fake
