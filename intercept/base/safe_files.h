// Opens files in places that other users, or careless programs of this user, may have prepared.
//
// The rules are those of sshd's StrictModes: only this user and root can replace a part of
// the path, no symbolic link is followed below the directory that was checked, and a file counts
// as reft's own only if it is regular, belongs to this user, is closed to others, and has one name.
//
// Threads: re-entrant. Errors: SystemError, or Unavailable with what is wrong and what to do.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <string>

#include "intercept/base/unique_fd.h"

namespace reft {

// Opens `name` below the directory `at`. `name` is relative, and no part of it may be a link or
// "..". An empty descriptor and errno if it cannot be opened.
UniqueFd openBeneath(int at, const std::string& name, int flags, mode_t mode = 0) noexcept;

// As openBeneath() on kernels without openat2 (before 5.6): folder by folder with O_NOFOLLOW.
UniqueFd openStepwise(int at, const std::string& name, int flags, mode_t mode = 0) noexcept;

// Who may own parts of a path, besides root.
struct Trusted {
  uid_t user;    // this one
  uid_t system;  // the owner of /, which is not root in a user namespace without a map for it
};

// Why another user could replace `path`, a directory or a link to one, of which lstat() returned
// `info`; "" if none can. Directories above it are not looked at.
std::string partProblem(const std::string& path, const struct stat& info, const Trusted& trusted);

// Why another user could replace a part of `path`, a directory; "" if none can. Each directory
// above it must belong to this user, to root or to the owner of /, and be writable by its owner
// alone, or be sticky as /tmp is. A link must belong to one of them.
std::string chainProblem(const std::string& path);

// Why `fd` is not a file that reft has made for this user alone, "" if it is one. A memfd and a
// file that was deleted have no name, so they fail.
std::string ownFileProblem(int fd);

// Whether `path` names the file or directory that `fd` has open, without following a link.
bool isAt(int fd, const std::string& path) noexcept;

}  // namespace reft
