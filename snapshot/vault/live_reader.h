// Reads memory of this process that may vanish meanwhile: a script, or one of its threads, may free
// or unmap a tensor's memory at any time.
//
// The copy is made by loads whose fault ends it and nothing else (guarded_copy.h). Where a fault
// would not come to reft, the kernel makes it, by a write into a small memfd: a page that is not
// there ends that call with EFAULT. A write also reads memory that process_vm_readv refuses (what a
// driver has mapped), no seccomp profile forbids it, and it takes twice the time.
//
// Threads: one at a time; ofThread() gives each thread its own. A forked child gets a new one.
// Errors:  none; without a descriptor, nothing can be read, and why() returns the reason.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string>

#include "intercept/base/unique_fd.h"
#include "snapshot/vault/mapping.h"

namespace reft {

class LiveReader {
 public:
  // Of one call: fits the second cache, and outweighs the cost of a call.
  static constexpr size_t kMostBytes = size_t{128} << 10;
  static constexpr size_t kMostParts = 512;

  static LiveReader& ofThread();

  // Copies `parts`, together at most kMostBytes, one behind the other. Returns the bytes of them
  // that could be read, up to the first that could not.
  size_t gather(std::span<const iovec> parts);
  // nullptr: not all of it could be read, or it is more than kMostBytes.
  const std::byte* read(const std::byte* from, size_t bytes);
  // What the last call read, until the next.
  const std::byte* data() const { return copy_.data(); }

  // Why nothing can be read at all; empty: it can.
  const std::string& why() const { return why_; }

 private:
  bool open();
  size_t load(std::span<const iovec> parts);
  size_t write(std::span<const iovec> parts);

  int process_ = 0;  // that made the two below: a child would share them with its parent
  UniqueFd fd_;
  Mapping copy_;
  std::string why_;
};

// Part of memory, for gather().
inline iovec partOf(const std::byte* from, size_t bytes) {
  return {const_cast<std::byte*>(from), bytes};
}

}  // namespace reft
