#include "snapshot/vault/live_reader.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "intercept/base/error.h"
#include "snapshot/vault/guarded_copy.h"

namespace reft {

LiveReader& LiveReader::ofThread() {
  thread_local LiveReader reader;
  return reader;
}

bool LiveReader::open() {
  const int process = ::getpid();
  if (fd_ && process_ == process) {
    return true;
  }
  try {
    UniqueFd fd(::memfd_create("reft-live", MFD_CLOEXEC));
    if (!fd || ::ftruncate(fd.get(), kMostBytes) != 0) {
      throw SystemError("memfd_create to read live memory");
    }
    Mapping copy(fd.get(), 0, kMostBytes, /*writable=*/true);
    copy.populate(fd.get(), 0);
    fd_ = std::move(fd);
    copy_ = std::move(copy);
    process_ = process;
    why_.clear();
    return true;
  } catch (const Error& error) {
    why_ = error.what();
    return false;
  }
}

size_t LiveReader::gather(std::span<const iovec> parts) {
  if (!open()) {
    return 0;
  }
  return isGuarded() ? load(parts) : write(parts);
}

size_t LiveReader::load(std::span<const iovec> parts) {
  size_t done = 0;
  for (const iovec& part : parts) {
    const size_t bytes = std::min(part.iov_len, kMostBytes - done);
    const size_t copied =
        guardedCopy(copy_.data() + done, static_cast<const std::byte*>(part.iov_base), bytes);
    done += copied;
    if (copied < part.iov_len) {
      break;
    }
  }
  return done;
}

size_t LiveReader::write(std::span<const iovec> parts) {
  ssize_t done = 0;
  do {
    done = ::pwritev(fd_.get(), parts.data(), static_cast<int>(parts.size()), 0);
  } while (done < 0 && errno == EINTR);
  return done < 0 ? 0 : static_cast<size_t>(done);
}

const std::byte* LiveReader::read(const std::byte* from, size_t bytes) {
  if (bytes > kMostBytes) {
    return nullptr;
  }
  const iovec part = partOf(from, bytes);
  return gather({&part, 1}) == bytes && why_.empty() ? data() : nullptr;
}

}  // namespace reft
