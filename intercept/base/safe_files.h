// Opens files in places that other users, or careless programs of this user, may have prepared.
//
// The rules are those of sshd's StrictModes: only this user and root can replace a part of
// the path, no symbolic link is followed below the directory that was checked, and a file counts
// as reft's own only if it is regular, belongs to this user, is closed to others, and has one name.
//
// Threads: re-entrant. Errors: SystemError, or Unavailable with what is wrong and what to do.
#pragma once

#include <sys/types.h>

#include <string>

#include "intercept/base/unique_fd.h"

namespace reft {

// Opens `name` below the directory `at`. `name` is relative, and no part of it may be a link or
// "..". An empty descriptor and errno if it cannot be opened.
UniqueFd openBeneath(int at, const std::string& name, int flags, mode_t mode = 0) noexcept;

// As openBeneath() on kernels without openat2 (before 5.6): folder by folder with O_NOFOLLOW.
UniqueFd openStepwise(int at, const std::string& name, int flags, mode_t mode = 0) noexcept;

// Why another user could replace a part of `path`, a directory; "" if none can. Each directory
// above it must belong to this user or to the system (the owner of /), and be writable by its
// owner alone, or be sticky as /tmp is.
std::string chainProblem(const std::string& path);

// Why `fd` is not a file that reft has made for this user alone, "" if it is one. A memfd and a
// file that was deleted have no name, so they fail.
std::string ownFileProblem(int fd);

// Whether `path` names the file or directory that `fd` has open, without following a link.
bool isAt(int fd, const std::string& path) noexcept;

}  // namespace reft
