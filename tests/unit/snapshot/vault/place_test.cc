#include "snapshot/vault/place.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>

#include "intercept/base/unique_fd.h"

namespace reft {
namespace place_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(VaultPlace, AllowsFileSystemsThatWriteInPlace) {
  for (const int64_t type : {int64_t{TMPFS_MAGIC}, int64_t{RAMFS_MAGIC}, int64_t{EXT4_SUPER_MAGIC},
                             int64_t{0x58465342}, int64_t{OVERLAYFS_SUPER_MAGIC}}) {
    EXPECT_EQ(fileSystemProblem(type), "") << std::hex << type;
  }
}

TEST(VaultPlace, NamesFileSystemsWhereAnAllocatedPageCanBeLost) {
  EXPECT_THAT(fileSystemProblem(BTRFS_SUPER_MAGIC), StartsWith("is on btrfs, where"));
  EXPECT_THAT(fileSystemProblem(NFS_SUPER_MAGIC), StartsWith("is on nfs, where"));
  EXPECT_THAT(fileSystemProblem(0x2fc12fc1), StartsWith("is on zfs, where"));
  EXPECT_THAT(fileSystemProblem(static_cast<int32_t>(0xff534d42)), StartsWith("is on cifs, where"));
  EXPECT_THAT(fileSystemProblem(0x1234), HasSubstr("type 0x1234"));
}

TEST(VaultPlace, LooksAtWhatADescriptorIsOn) {
  const UniqueFd memory(::open("/dev/shm", O_PATH | O_CLOEXEC));
  const UniqueFd processes(::open("/proc", O_PATH | O_CLOEXEC));
  ASSERT_TRUE(processes);
  if (memory) {
    EXPECT_EQ(vaultPlaceProblem(memory.get()), "");
  }
  EXPECT_THAT(vaultPlaceProblem(processes.get()), HasSubstr("type 0x9fa0"));
  EXPECT_THAT(vaultPlaceProblem(-1), HasSubstr("unknown"));
}

}  // namespace place_test
}  // namespace reft
