#include "snapshot/vault/place.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace reft {

namespace {

struct FileSystem {
  uint32_t type;
  const char* name;
};

// Those that write in place. An overlay passes writes on to the file system of its upper layer,
// which it does not name. It is allowed, because containers have hardly anything else.
constexpr uint32_t kXfs = 0x58465342;
constexpr uint32_t kInPlace[] = {TMPFS_MAGIC, RAMFS_MAGIC, EXT4_SUPER_MAGIC, kXfs,
                                 OVERLAYFS_SUPER_MAGIC};

constexpr FileSystem kOthers[] = {
    {BTRFS_SUPER_MAGIC, "btrfs"}, {0x2fc12fc1, "zfs"},        {NFS_SUPER_MAGIC, "nfs"},
    {0x0bd00bd0, "lustre"},       {FUSE_SUPER_MAGIC, "fuse"}, {CEPH_SUPER_MAGIC, "ceph"},
    {0x47504653, "gpfs"},         {0x19830326, "beegfs"},     {0xff534d42, "cifs"},
    {0xfe534d42, "smb"},          {V9FS_MAGIC, "9p"},         {F2FS_SUPER_MAGIC, "f2fs"},
    {0xca451a4e, "bcachefs"},
};

}  // namespace

std::string fileSystemProblem(int64_t type) {
  const auto number = static_cast<uint32_t>(type);  // some are negative where f_type is an int
  for (const uint32_t allowed : kInPlace) {
    if (number == allowed) {
      return "";
    }
  }
  char name[48];
  std::snprintf(name, sizeof(name), "a file system of type %#x", number);
  for (const FileSystem& known : kOthers) {
    if (number == known.type) {
      std::snprintf(name, sizeof(name), "%s", known.name);
    }
  }
  return std::string("is on ") + name +
         ", where a write to memory that is already allocated can fail or block, and training "
         "with it";
}

std::string vaultPlaceProblem(int fd) {
  struct statfs info {};
  if (::fstatfs(fd, &info) != 0) {
    return std::string("is on an unknown file system (fstatfs: ") + std::strerror(errno) + ")";
  }
  return fileSystemProblem(static_cast<int64_t>(info.f_type));
}

bool isInMemory(int fd) {
  struct statfs info {};
  if (::fstatfs(fd, &info) != 0) {
    return false;
  }
  const auto type = static_cast<uint32_t>(info.f_type);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC;
}

}  // namespace reft
