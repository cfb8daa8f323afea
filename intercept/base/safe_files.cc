#include "intercept/base/safe_files.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "intercept/base/error.h"

namespace reft {

namespace {

constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

bool isPlainRelative(const std::string& name) {
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const auto part = name.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") {
      return false;
    }
    begin = end + 1;
  }
  return true;
}

struct stat infoOf(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    throw SystemError("lstat " + path);
  }
  return info;
}

// Of each directory of `path`, which is absolute.
std::string problemAlong(const std::string& path) {
  const Trusted trusted{.user = ::geteuid(), .system = infoOf("/").st_uid};
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const auto part = path.substr(0, end);
    if (part.size() > 1 && part.back() != '/') {
      if (auto problem = partProblem(part, infoOf(part), trusted); !problem.empty()) {
        return problem;
      }
    }
    if (end == std::string::npos) {
      return "";
    }
  }
}

}  // namespace

UniqueFd openBeneath(int at, const std::string& name, int flags, mode_t mode) noexcept {
  try {
    open_how how{};
    how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
    how.mode = (flags & O_CREAT) != 0 ? mode : 0;
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
    const long fd = ::syscall(SYS_openat2, at, name.c_str(), &how, sizeof(how));
    // EPERM: a seccomp filter of a container that does not know the call.
    return fd < 0 && (errno == ENOSYS || errno == EPERM) ? openStepwise(at, name, flags, mode)
                                                         : UniqueFd(static_cast<int>(fd));
  } catch (const std::exception&) {
    errno = ENOMEM;
    return UniqueFd();
  }
}

UniqueFd openStepwise(int at, const std::string& name, int flags, mode_t mode) noexcept {
  try {
    if (!isPlainRelative(name)) {
      errno = EXDEV;  // as openat2
      return UniqueFd();
    }
    UniqueFd folder;
    size_t begin = 0;
    for (size_t end = name.find('/'); end != std::string::npos; end = name.find('/', begin)) {
      UniqueFd next(::openat(folder ? folder.get() : at, name.substr(begin, end - begin).c_str(),
                             O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!next) {
        return UniqueFd();
      }
      folder = std::move(next);
      begin = end + 1;
    }
    return UniqueFd(::openat(folder ? folder.get() : at, name.substr(begin).c_str(),
                             flags | O_NOFOLLOW | O_CLOEXEC, mode));
  } catch (const std::exception&) {
    errno = ENOMEM;
    return UniqueFd();
  }
}

std::string partProblem(const std::string& path, const struct stat& info, const Trusted& trusted) {
  const bool link = S_ISLNK(info.st_mode);
  if (!link && !S_ISDIR(info.st_mode)) {
    return path + " is not a directory";
  }
  // A link, too: only the owner of a directory that is checked as well could have made it.
  if (info.st_uid != trusted.user && info.st_uid != trusted.system && info.st_uid != 0) {
    return path + (link ? " is a link of user " : " belongs to user ") +
           std::to_string(info.st_uid);
  }
  if (!link && (info.st_mode & kOthersWrite) != 0 && (info.st_mode & S_ISVTX) == 0) {
    return path + " is writable by other users";
  }
  return "";
}

std::string chainProblem(const std::string& path) {
  if (path.empty() || path[0] != '/') {
    return "'" + path + "' is not an absolute path";
  }
  if (auto problem = problemAlong(path); !problem.empty()) {
    return problem;
  }
  // What links lead to counts, too.
  const std::unique_ptr<char, void (*)(void*)> whole(::realpath(path.c_str(), nullptr), ::free);
  if (!whole) {
    throw SystemError("realpath " + path);
  }
  return problemAlong(whole.get());
}

std::string ownFileProblem(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw SystemError("fstat");
  }
  if (!S_ISREG(info.st_mode)) {
    return "not a regular file";
  }
  if (info.st_uid != ::geteuid()) {
    return "belongs to user " + std::to_string(info.st_uid);
  }
  if ((info.st_mode & 077) != 0) {
    return "open to other users (its mode must be 0600)";
  }
  if (info.st_nlink != 1) {
    return "has " + std::to_string(info.st_nlink) + " names";
  }
  return "";
}

bool isAt(int fd, const std::string& path) noexcept {
  struct stat open_file {};
  struct stat there {};
  return ::fstat(fd, &open_file) == 0 && ::lstat(path.c_str(), &there) == 0 &&
         open_file.st_ino == there.st_ino && open_file.st_dev == there.st_dev;
}

}  // namespace reft
