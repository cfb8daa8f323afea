// Whether a vault can be a file in a given place.
//
// Training writes to the mapped vault, and reft allocates each page before. That is enough only if
// the file system then writes in place. Others take new space for each write, compress, or ask a
// server: such a write can fail, which ends the process with SIGBUS, or block for ever.
//
// Files on tmpfs and ramfs take memory as anonymous vaults do.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <string>

namespace reft {

// Why a vault cannot be on a file system of this type (statfs::f_type): "is on btrfs, where …";
// "" if it can.
std::string fileSystemProblem(int64_t type);

// The same for what `fd`, a file or directory, is on.
std::string vaultPlaceProblem(int fd);

// Whether what `fd` is on keeps files in memory: tmpfs, ramfs. False if it cannot be read.
bool isInMemory(int fd);

}  // namespace reft
