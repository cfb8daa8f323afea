// Memory of a vault's file, mapped.
//
// Threads: one owner, as any value. Errors: SystemError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace reft {

// Length of the file, now.
uint64_t fileBytes(int fd);

// Whether so many bytes more may be taken now.
using Room = std::function<bool(uint64_t bytes)>;

// An mmap with one owner. Core dumps leave its memory out.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t offset, uint64_t bytes, bool writable);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Whether replaceLostPage() has replaced a page of it. Then what has been written since may not
  // be in the file.
  bool lostPages() const;

  // Touches every page, so that the first snapshot does not pay for it. `fd` and `offset` are those
  // of the constructor. Throws if the memory cannot be had; no page is then lost to a signal.
  // `room`: asked before each part, because a control group that is full ends a process instead of
  // refusing memory.
  void populate(int fd, uint64_t offset, const Room& room = {});

 private:
  struct Place;
  friend bool replaceLostPage(const void* address) noexcept;
  void populatePart(int fd, uint64_t offset, uint64_t at, uint64_t bytes);

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  Place* place_ = nullptr;
};

// Puts a page of zeros in place of the page of a Mapping that its file no longer has, because the
// file was cut off, or because its disk failed. For a handler of SIGBUS, so that the program goes
// on. False if `address` is in no Mapping: the signal has another cause. Async-signal-safe.
bool replaceLostPage(const void* address) noexcept;

}  // namespace reft
