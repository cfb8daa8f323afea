#include "snapshot/vault/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

#include "intercept/base/error.h"
#include "snapshot/vault/vault_format.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace reft {

namespace {

constexpr uint64_t kPart = uint64_t{64} << 20;  // that is taken at once

const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));

}  // namespace

// Where a Mapping is, for replaceLostPage(). One that finds no place is not protected.
struct Mapping::Place {
  std::atomic<uintptr_t> begin{0};  // 0: free; 1: being filled in
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> lost{false};

  static std::array<Place, 4096> all;
  static Place* take(uintptr_t begin, uint64_t bytes) noexcept;
};

std::array<Mapping::Place, 4096> Mapping::Place::all;

Mapping::Place* Mapping::Place::take(uintptr_t begin, uint64_t bytes) noexcept {
  for (Place& place : all) {
    uintptr_t none = 0;
    if (place.begin.load(std::memory_order_relaxed) == 0 &&
        place.begin.compare_exchange_strong(none, 1)) {
      place.lost = false;
      place.end = begin + bytes;
      place.begin = begin;
      return &place;
    }
  }
  return nullptr;
}

bool replaceLostPage(const void* address) noexcept {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (Mapping::Place& place : Mapping::Place::all) {
    const uintptr_t begin = place.begin;
    if (begin > 1 && at >= begin && at < place.end) {
      const int saved = errno;
      void* page = ::mmap(reinterpret_cast<void*>(at / page_bytes * page_bytes), page_bytes,
                          PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      errno = saved;
      place.lost = true;
      return page != MAP_FAILED;
    }
  }
  return false;
}

uint64_t fileBytes(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw SystemError("fstat of a vault");
  }
  return static_cast<uint64_t>(info.st_size);
}

Mapping::Mapping(int fd, uint64_t offset, uint64_t bytes, bool writable) : bytes_(bytes) {
  void* address = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                         fd, static_cast<off_t>(offset));
  if (address == MAP_FAILED) {
    throw SystemError("mapping " + std::to_string(bytes) + " bytes of a vault");
  }
  data_ = static_cast<std::byte*>(address);
  place_ = Place::take(reinterpret_cast<uintptr_t>(address), bytes);
  // A core dump of a rank or an agent would contain the whole model. Kernels that cannot are old.
  ::madvise(address, bytes, MADV_DONTDUMP);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      place_(std::exchange(other.place_, nullptr)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(place_, other.place_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    if (place_ != nullptr) {
      place_->end = 0;
      place_->begin = 0;
    }
    ::munmap(data_, bytes_);
  }
}

bool Mapping::lostPages() const {
  return place_ != nullptr && place_->lost;
}

void Mapping::populate(int fd, uint64_t offset, const Room& room) {
  for (uint64_t at = 0; at < bytes_; at += kPart) {
    const uint64_t part = std::min(kPart, bytes_ - at);
    if (room && !room(part)) {
      throw SystemError("taking " + std::to_string(bytes_) + " bytes for the vault: after " +
                            std::to_string(at) + ", this node has not enough left",
                        ENOMEM);
    }
    populatePart(fd, offset, at, part);
  }
}

void Mapping::populatePart(int fd, uint64_t offset, uint64_t at, uint64_t bytes) {
  if (::madvise(data_ + at, bytes, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  const std::string what = "taking " + std::to_string(bytes_) + " bytes for the vault";
  if (errno == ENOMEM || errno == EFAULT || errno == ENOSPC) {
    // EFAULT: the file system had no page to give.
    throw SystemError(what, errno == EFAULT ? ENOSPC : errno);
  }
  // Kernels before 5.14. Touching a page that cannot be had would kill the process, so all are
  // allocated first.
  const int failed =
      ::posix_fallocate(fd, static_cast<off_t>(offset + at), static_cast<off_t>(bytes));
  if (failed != 0) {
    throw SystemError(what, failed);
  }
  for (uint64_t page = at; page < at + bytes; page += kPage) {
    auto* byte = reinterpret_cast<volatile std::byte*>(data_ + page);
    *byte = *byte;
  }
}

}  // namespace reft
