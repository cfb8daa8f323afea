#include "tests/fakes/cuda/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace reft::fake {

namespace {

constexpr size_t kPage = 4096;
size_t wholePages(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

}  // namespace

Memory::Memory(int devices, size_t bytes_per_device) : total_(bytes_per_device) {
  for (int device = 0; device < devices; ++device) {
    used_[device] = 0;
  }
}

Result Memory::map(int device, int fd, size_t bytes, bool counted, void** address) {
  void* user = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  void* shadow = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (user == MAP_FAILED || shadow == MAP_FAILED) {
    if (user != MAP_FAILED) {
      ::munmap(user, bytes);
    }
    return kOutOfMemory;
  }
  const std::lock_guard lock(mutex_);
  ranges_[static_cast<char*>(user)] = {static_cast<char*>(user),
                                       bytes,
                                       static_cast<char*>(shadow),
                                       MemoryKind::kDevice,
                                       device,
                                       fd,
                                       counted};
  *address = user;
  return kSuccess;
}

Result Memory::allocate(int device, size_t bytes, void** address) {
  *address = nullptr;
  if (bytes == 0) {
    return kSuccess;
  }
  bytes = wholePages(bytes);
  {
    const std::lock_guard lock(mutex_);
    if (bytes > total_ || used_[device] > total_ - bytes) {
      return kOutOfMemory;
    }
    used_[device] += bytes;
  }
  const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
  Result result =
      fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0 ? kOutOfMemory : kSuccess;
  if (result == kSuccess) {
    result = map(device, fd, bytes, /*counted=*/true, address);
  }
  if (result != kSuccess) {
    if (fd >= 0) {
      ::close(fd);
    }
    const std::lock_guard lock(mutex_);
    used_[device] -= bytes;
  }
  return result;
}

Result Memory::import(int device, int fd, size_t bytes, void** address) {
  return map(device, fd, bytes, /*counted=*/false, address);
}

Result Memory::free(void* address) {
  if (address == nullptr) {
    return kSuccess;
  }
  Range range;
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(static_cast<char*>(address));
    if (found == ranges_.end() || found->second.kind != MemoryKind::kDevice) {
      return kInvalidValue;
    }
    range = found->second;
    ranges_.erase(found);
    used_[range.device] -= range.counted ? range.bytes : 0;
  }
  ::munmap(range.base, range.bytes);
  ::munmap(range.shadow, range.bytes);
  ::close(range.fd);
  return kSuccess;
}

Result Memory::allocateHost(size_t bytes, void** address) {
  bytes = wholePages(bytes);
  void* found = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) {
    return kOutOfMemory;
  }
  *address = found;
  return registerHost(found, bytes, 0);
}

Result Memory::freeHost(void* address) {
  if (address == nullptr) {
    return kSuccess;
  }
  const auto range = find(address);
  const Result result = unregisterHost(address);
  if (result == kSuccess) {
    ::munmap(address, range->bytes);
  }
  return result == kHostMemoryNotRegistered ? kInvalidValue : result;
}

Result Memory::registerHost(void* address, size_t bytes, int device) {
  if (address == nullptr || bytes == 0) {
    return kInvalidValue;
  }
  auto* const base = static_cast<char*>(address);
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.lower_bound(base);
  if (findLocked(base) != nullptr || (next != ranges_.end() && next->first < base + bytes)) {
    return kHostMemoryAlreadyRegistered;
  }
  ranges_[base] = {base, bytes, base, MemoryKind::kHost, device, -1, false};
  return kSuccess;
}

Result Memory::unregisterHost(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(static_cast<char*>(address));
  if (found == ranges_.end() || found->second.kind != MemoryKind::kHost) {
    return kHostMemoryNotRegistered;
  }
  ranges_.erase(found);
  return kSuccess;
}

void Memory::forgetRegistered() {
  const std::lock_guard lock(mutex_);
  std::erase_if(ranges_, [](const auto& entry) { return entry.second.kind == MemoryKind::kHost; });
}

const Range* Memory::findLocked(const void* address) const {
  auto* const at = static_cast<char*>(const_cast<void*>(address));
  auto next = ranges_.upper_bound(at);
  if (next == ranges_.begin()) {
    return nullptr;
  }
  const Range& range = std::prev(next)->second;
  return at < range.base + range.bytes ? &range : nullptr;
}

std::optional<Range> Memory::find(const void* address) const {
  const std::lock_guard lock(mutex_);
  const Range* range = findLocked(address);
  return range == nullptr ? std::nullopt : std::optional(*range);
}

char* Memory::shadow(const void* address) const {
  auto* const at = static_cast<char*>(const_cast<void*>(address));
  const std::lock_guard lock(mutex_);
  const Range* range = findLocked(address);
  return range == nullptr ? at : range->shadow + (at - range->base);
}

bool Memory::contains(const void* address, size_t bytes) const {
  const auto range = find(address);
  return range.has_value() &&
         bytes <=
             range->bytes - static_cast<size_t>(static_cast<const char*>(address) - range->base);
}

size_t Memory::used(int device) const {
  const std::lock_guard lock(mutex_);
  return used_.at(device);
}

}  // namespace reft::fake
