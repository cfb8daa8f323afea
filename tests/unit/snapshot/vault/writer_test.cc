#include "snapshot/vault/writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "tests/unit/snapshot/vault/vault_fixture.h"

namespace reft {
namespace writer_test {

using VaultWriterTest = VaultTest;

INSTANTIATE_TEST_SUITE_P(Memory, VaultWriterTest, testing::Values(false));
INSTANTIATE_TEST_SUITE_P(File, VaultWriterTest, testing::Values(true));

TEST_P(VaultWriterTest, AdoptKeepsSlotsAndReservesWithoutMovingThem) {
  seal(0, 5);
  seal(1, 6);
  const uint64_t bytes = vault_->bytes();
  UniqueFd fd(::fcntl(vault_->fd(), F_DUPFD_CLOEXEC, 3));
  vault_.reset();
  vault_ = Vault::adopt(std::move(fd), kIdentity);
  EXPECT_EQ(vault_->slots(), 2u);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 2u);
  seal(0, 7);
  EXPECT_EQ(vault_->bytes(), bytes);
  const VaultReader reader(vault_->fd());
  ASSERT_EQ(reader.slots().size(), 2u);
  EXPECT_EQ(reader.slots()[0].step, 7);
  EXPECT_EQ(reader.slots()[1].step, 6);
}

TEST_P(VaultWriterTest, NobodyCanForbidARankToWriteItsVault) {
  if (GetParam()) {
    GTEST_SKIP() << "a file has no seals";
  }
  EXPECT_NE(::fcntl(vault_->fd(), F_ADD_SEALS, F_SEAL_GROW), 0);
  EXPECT_EQ(::fcntl(vault_->fd(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_SEAL);
}

TEST_P(VaultWriterTest, AdoptRefusesAnotherIdentity) {
  for (const VaultIdentity& other :
       {VaultIdentity{"other", 1, 4}, VaultIdentity{"job", 2, 4}, VaultIdentity{"job", 1, 8}}) {
    UniqueFd fd(::fcntl(vault_->fd(), F_DUPFD_CLOEXEC, 3));
    EXPECT_THROW(Vault::adopt(std::move(fd), other), Corruption);
  }
}

TEST_P(VaultWriterTest, AdoptSurvivesExtentsAndHeadersThatAreDamaged) {
  seal(0, 5);
  seal(1, 6);
  const SlotExtent bad{1000, 17,
                       hashBytes(std::vector<uint64_t>{1000, 17, 0}.data(), 24, kSlotMagic)};
  write(offsetof(Superblock, extents), bad);
  write<uint64_t>(extent(1).offset + offsetof(SlotHeader, chunk_hashes_offset), 4097);
  UniqueFd fd(::fcntl(vault_->fd(), F_DUPFD_CLOEXEC, 3));
  vault_ = Vault::adopt(std::move(fd), kIdentity);
  seal(0, 8);
  seal(1, 9);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 2u);
}

TEST_P(VaultWriterTest, GrowingASlotLosesItsContentsAndGivesTheMemoryBack) {
  seal(0, 5, 1 << 20);
  seal(1, 6, 10'000);
  const auto usedBlocks = [&] {
    struct stat info {};
    ::fstat(vault_->fd(), &info);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  const uint64_t before = usedBlocks();
  VaultReader reader(vault_->fd());
  const auto old = reader.slots();
  vault_->reserveSlot(0, 100, 100, 1000, 2 << 20);
  EXPECT_FALSE(reader.isUnchanged(old[0]));
  EXPECT_TRUE(reader.isUnchanged(old[1]));
  reader.refresh();
  EXPECT_FALSE(reader.isUnchanged(old[0]));
  EXPECT_EQ(reader.slots().size(), 1u);
  EXPECT_LT(usedBlocks(), before + (1 << 20) + (256 << 10)) << "the old place is a hole";
  seal(0, 7, 2 << 20);
  EXPECT_TRUE(reader.isUnchanged(reader.slots()[0]));
}

TEST_P(VaultWriterTest, ClearedSlotIsAbsent) {
  seal(0, 5);
  vault_->clearSlot(0);
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
}

TEST_P(VaultWriterTest, ObjectsThatDoNotFitAreRefused) {
  seal(0, 5, 1000, 'x', "small");
  EXPECT_FALSE(vault_->putObjects(0, std::string(vault_->objectCapacity(0) + 1, 'o')));
  EXPECT_TRUE(vault_->putObjects(0, std::string(vault_->objectCapacity(0), 'o')));
}

TEST_P(VaultWriterTest, ManyGroupsKeepTheFirstDigests) {
  begin(0, 5, 10, 'x', "");
  vault_->sealSlot(0, std::vector<uint64_t>(kMaxGroupDigests + 5, 3), 1);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().at(0).group_digests.size(), kMaxGroupDigests);
}

TEST_P(VaultWriterTest, ASlotThatIsReleasedGivesItsMemoryBackAndCanBeReservedAgain) {
  seal(0, 5, 1 << 20);
  seal(1, 6, 1 << 20);
  const auto usedBlocks = [&] {
    struct stat info {};
    ::fstat(vault_->fd(), &info);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  const uint64_t before = usedBlocks();
  EXPECT_GE(vault_->releaseSlot(0), 1u << 20);
  EXPECT_LE(usedBlocks() + (1 << 20), before);
  EXPECT_EQ(vault_->releaseSlot(0), 0u);
  {
    const VaultReader reader(vault_->fd());
    ASSERT_EQ(reader.slots().size(), 1u);
    EXPECT_EQ(reader.slots()[0].step, 6);
  }
  seal(0, 7, 1 << 20);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 2u);
}

TEST(VaultGrowth, AsksForRoomBeforeEachPartAndGivesBackWhatItTook) {
  constexpr uint64_t kPart = uint64_t{64} << 20;
  const auto vault = Vault::create({"job", 0, 1}, 2, 64);
  const auto usedBytes = [&] {
    struct stat info {};
    ::fstat(vault->fd(), &info);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  const uint64_t before = usedBytes();
  std::vector<uint64_t> asked;
  vault->askRoom([&](uint64_t bytes) {
    asked.push_back(bytes);
    if (asked.size() > 1) {
      EXPECT_GE(usedBytes() - before + 1, (asked.size() - 2) * kPart);
    }
    return asked.size() < 4;
  });
  EXPECT_THROW(vault->reserveSlot(0, 100, 100, 10, 3 * kPart), SystemError);
  ASSERT_EQ(asked.size(), 4u);
  EXPECT_GT(asked[0], 3 * kPart) << "the whole first: else it would be taken in vain";
  EXPECT_EQ(asked[1], kPart);
  EXPECT_EQ(usedBytes(), before);
  vault->askRoom({});
  vault->reserveSlot(0, 100, 100, 10, 1000);
}

TEST(VaultGrowth, ASlotThatGrowsWithoutRoomForTwoGivesItsOldPlaceBackFirst) {
  constexpr uint64_t kBytes = 8 << 20;
  const auto vault = Vault::create(kIdentity, 2, 64);
  const auto usedBytes = [&] {
    struct stat info {};
    ::fstat(vault->fd(), &info);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  vault->reserveSlot(0, 100, 100, 10, kBytes);
  const uint64_t most = usedBytes() + kBytes / 2;
  vault->askRoom([&](uint64_t bytes) { return usedBytes() + bytes <= most; });
  vault->reserveSlot(0, 100, kBytes / 4, 10, kBytes);
  EXPECT_GE(vault->objectCapacity(0), kBytes / 4);
  EXPECT_LE(usedBytes(), most);
  EXPECT_THROW(vault->reserveSlot(0, 100, kBytes, 10, kBytes), SystemError);
  EXPECT_LT(usedBytes(), kBytes) << "nothing is kept that no slot has";
}

TEST(VaultGrowth, WhatAnInterruptedGrowthHasTakenGoesWhenTheVaultIsAdopted) {
  constexpr uint64_t kBytes = 1 << 20;
  auto vault = Vault::create(kIdentity, 2, 64);
  vault->reserveSlot(0, 100, 100, 10, kBytes);
  UniqueFd fd(::fcntl(vault->fd(), F_DUPFD_CLOEXEC, 3));
  vault.reset();
  const uint64_t length = fileBytes(fd.get());
  struct stat before {};
  ::fstat(fd.get(), &before);
  ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(length + kBytes)), 0);
  ASSERT_EQ(::fallocate(fd.get(), 0, static_cast<off_t>(length), kBytes), 0);
  const auto adopted = Vault::adopt(std::move(fd), kIdentity);
  struct stat after {};
  ::fstat(adopted->fd(), &after);
  EXPECT_EQ(after.st_blocks, before.st_blocks);
  EXPECT_EQ(adopted->payloadCapacity(0), kBytes);
}

TEST(VaultGrowth, BeyondTheAddressSpaceLeavesTheFileAsItWas) {
  const auto vault = Vault::create(kIdentity, 2, 64);
  const uint64_t bytes = vault->bytes();
  EXPECT_THROW(vault->reserveSlot(0, 1, 1, 1, uint64_t{1} << 60), SystemError);
  EXPECT_EQ(vault->bytes(), bytes);
  EXPECT_NO_THROW(VaultReader(vault->fd()));
  EXPECT_NO_THROW(vault->reserveSlot(0, 1, 1, 1, 1 << 20));
}

// In a file system of 4 MB: every capture tries again, and the file must not get longer each time.
TEST(VaultGrowth, WithoutMemoryKeepsTheSlotAndTheLengthOfTheFile) {
  char name[] = "/tmp/reft-vault-test-XXXXXX";
  const std::string directory = ::mkdtemp(name);
  const pid_t child = ::fork();
  if (child == 0) {
    if ((::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", directory.c_str(), "tmpfs", 0, "size=4m") != 0) {
      ::_exit(77);
    }
    const auto vault = Vault::create(kIdentity, 2, 64, directory + "/vault");
    vault->reserveSlot(0, 1, 1, 1, 1 << 20);
    const uint64_t table_hash = hashBytes("", 0);
    vault->beginSlot(0, 3, 1, "", table_hash, kChunk, 0, 0);
    vault->sealSlot(0, {}, 1);
    uint64_t bytes = 0;
    for (int i = 0; i < 3; ++i) {
      try {
        vault->reserveSlot(0, 1, 1, 1, 8 << 20);
        ::_exit(1);
      } catch (const SystemError&) {
      }
      if (i > 0 && vault->bytes() != bytes) {
        ::_exit(2);
      }
      bytes = vault->bytes();
    }
    if (VaultReader(vault->fd()).slots().size() != 1) {
      ::_exit(3);
    }
    vault->reserveSlot(0, 1, 1, 1, 2 << 20);  // what was touched is free again
    ::_exit(vault->bytes() == bytes ? 0 : 4);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  std::filesystem::remove_all(directory);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    GTEST_SKIP() << "mount namespaces are not allowed here";
  }
  EXPECT_EQ(status, 0);
}

TEST(VaultFile, IsPrivateReplacedWholeAndLeavesNoSecondName) {
  char name[] = "/tmp/reft-vault-test-XXXXXX";
  const std::string directory = ::mkdtemp(name);
  const std::string path = directory + "/vault";
  const auto first = Vault::create(kIdentity, 1, 64, path);
  const auto second = Vault::create(kIdentity, 2, 64, path);
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(VaultReader(fd.get()).bytes(), second->bytes());
  std::filesystem::remove_all(directory);
}

TEST(Vault, CreateNamesWhatIsWrong) {
  EXPECT_THROW(Vault::create(kIdentity, 0, 64), InvalidArgument);
  EXPECT_THROW(Vault::create(kIdentity, kMaxSlots + 1, 64), InvalidArgument);
  EXPECT_THROW(Vault::create({std::string(128, 'j'), 0, 1}, 2, 64), InvalidArgument);
  EXPECT_THROW(Vault::create(kIdentity, 2, 64, "/nonexistent-directory/vault"), SystemError);
}

}  // namespace writer_test
}  // namespace reft
