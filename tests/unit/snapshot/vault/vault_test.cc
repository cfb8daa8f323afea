#include "snapshot/vault/vault.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/op_log.h"

namespace reft {
namespace {

constexpr uint64_t kChunk = 4096;
const VaultIdentity kIdentity{"job", 1, 4};

std::string messageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Corruption& error) {
    return error.what();
  }
  return "";
}

// A vault in memory or in a file, with raw access to its bytes.
class VaultTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) {
      char name[] = "/tmp/reft-vault-test-XXXXXX";
      directory_ = ::mkdtemp(name);
      path_ = directory_ + "/vault";
    }
    vault_ = Vault::create(kIdentity, 2, 64, path_);
  }
  void TearDown() override {
    vault_.reset();
    if (!directory_.empty()) {
      std::filesystem::remove_all(directory_);
    }
  }

  static SnapshotTable table(uint64_t bytes) {
    return buildTable(
        1, 4,
        {{"w", "uint8", {static_cast<int64_t>(bytes)}, bytes, bytes == 0 ? 0u : 1u, -1, false}}, {},
        "none", 0, kChunk);
  }

  // Seals `step` with a payload of `fill` bytes.
  void seal(uint32_t slot, int64_t step, uint64_t bytes = 10'000, char fill = 'x',
            const std::string& objects = "objects") {
    begin(slot, step, bytes, fill, objects);
    vault_->sealSlot(slot, std::vector<uint64_t>{11, 22}, 99);
  }
  void begin(uint32_t slot, int64_t step, uint64_t bytes, char fill, const std::string& objects) {
    const SnapshotTable t = table(bytes);
    const std::string json = t.toJson();
    const uint64_t chunks = (t.payload_bytes + kChunk - 1) / kChunk;
    vault_->reserveSlot(slot, json.size(), objects.size(), chunks, t.payload_bytes);
    vault_->beginSlot(slot, step, 7, json, hashBytes(json.data(), json.size()), kChunk,
                      t.payload_bytes, chunks);
    ASSERT_TRUE(vault_->putObjects(slot, objects));
    std::memset(vault_->payload(slot), fill, t.payload_bytes);
    for (uint64_t i = 0; i < chunks; ++i) {
      vault_->chunkHashes(slot)[i] = hashBytes(vault_->payload(slot) + i * kChunk,
                                               std::min(kChunk, t.payload_bytes - i * kChunk));
    }
  }

  template <typename T>
  T read(uint64_t at) {
    T value{};
    EXPECT_EQ(::pread(vault_->fd(), &value, sizeof(value), static_cast<off_t>(at)),
              static_cast<ssize_t>(sizeof(value)));
    return value;
  }
  template <typename T>
  void write(uint64_t at, T value) {
    ASSERT_EQ(::pwrite(vault_->fd(), &value, sizeof(value), static_cast<off_t>(at)),
              static_cast<ssize_t>(sizeof(value)));
  }
  void flip(uint64_t at) { write<uint8_t>(at, read<uint8_t>(at) ^ 0x10); }
  SlotExtent extent(uint32_t slot) {
    return read<SlotExtent>(offsetof(Superblock, extents) + slot * sizeof(SlotExtent));
  }
  uint64_t field(uint32_t slot, size_t offset) {
    return read<uint64_t>(extent(slot).offset + offset);
  }
  // Makes the slot's header valid again after it was changed through write().
  void resign(uint32_t slot) {
    alignas(SlotHeader) char head[sizeof(SlotHeader)];
    const uint64_t at = extent(slot).offset;
    ASSERT_EQ(::pread(vault_->fd(), head, sizeof(head), static_cast<off_t>(at)),
              static_cast<ssize_t>(sizeof(head)));
    std::memset(head + offsetof(SlotHeader, state), 0, 4);
    std::memset(head + offsetof(SlotHeader, check), 0, 8);
    write<uint64_t>(at + offsetof(SlotHeader, check), hashBytes(head, sizeof(head)));
  }

  std::string directory_, path_;
  std::unique_ptr<Vault> vault_;
};

INSTANTIATE_TEST_SUITE_P(Memory, VaultTest, testing::Values(false));
INSTANTIATE_TEST_SUITE_P(File, VaultTest, testing::Values(true));

TEST_P(VaultTest, ReadsBackWhatWasSealed) {
  seal(0, 5, 10'000, 'a', "small state");
  const VaultReader reader(vault_->fd());
  EXPECT_EQ(reader.identity().job, "job");
  EXPECT_EQ(reader.identity().rank, 1);
  EXPECT_EQ(reader.identity().world, 4);
  const auto slots = reader.slots();
  ASSERT_EQ(slots.size(), 1u);
  EXPECT_EQ(slots[0].step, 5);
  EXPECT_EQ(slots[0].incarnation, 7u);
  EXPECT_EQ(slots[0].sealed_ns, 99);
  EXPECT_EQ(slots[0].group_digests, std::vector<uint64_t>({11, 22}));
  EXPECT_EQ(reader.objects(slots[0]), "small state");
  EXPECT_EQ(reader.table(slots[0]).toJson(), table(10'000).toJson());
  EXPECT_EQ(static_cast<char>(reader.payload(slots[0])[9'999]), 'a');
  EXPECT_TRUE(reader.verify(slots[0]).empty());
  EXPECT_TRUE(reader.stillSealed(slots[0]));
}

TEST_P(VaultTest, HoldsASnapshotWithoutAByte) {
  seal(0, 5, 0, 'a', "");
  const VaultReader reader(vault_->fd());
  ASSERT_EQ(reader.slots().size(), 1u);
  EXPECT_EQ(reader.objects(reader.slots()[0]), "");
  EXPECT_TRUE(reader.verify(reader.slots()[0]).empty());
}

TEST_P(VaultTest, CountersAndOpLogAreSeenByTheReader) {
  vault_->stats().steps.store(42);
  OpLog log(vault_->opLogArea(), 64);
  const VaultReader reader(vault_->fd());
  EXPECT_EQ(reader.stats().steps.load(), 42u);
  EXPECT_EQ(reader.opLogBytes(), vault_->opLogBytes());
  EXPECT_NO_THROW(OpLogReader(reader.opLogArea(), reader.opLogBytes()));
}

TEST_P(VaultTest, AdoptKeepsSlotsAndReservesWithoutMovingThem) {
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

TEST_P(VaultTest, AdoptRefusesAnotherIdentity) {
  for (const VaultIdentity& other :
       {VaultIdentity{"other", 1, 4}, VaultIdentity{"job", 2, 4}, VaultIdentity{"job", 1, 8}}) {
    UniqueFd fd(::fcntl(vault_->fd(), F_DUPFD_CLOEXEC, 3));
    EXPECT_THROW(Vault::adopt(std::move(fd), other), Corruption);
  }
}

TEST_P(VaultTest, AdoptSurvivesExtentsAndHeadersThatAreDamaged) {
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

TEST_P(VaultTest, GrowingASlotLosesItsContentsAndGivesTheMemoryBack) {
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
  EXPECT_FALSE(reader.stillSealed(old[0]));
  EXPECT_TRUE(reader.stillSealed(old[1]));
  reader.refresh();
  EXPECT_FALSE(reader.stillSealed(old[0]));
  EXPECT_EQ(reader.slots().size(), 1u);
  EXPECT_LT(usedBlocks(), before + (1 << 20) + (256 << 10)) << "the old place is a hole";
  seal(0, 7, 2 << 20);
  EXPECT_TRUE(reader.stillSealed(reader.slots()[0]));
}

// The writer may move a slot behind the end of what the reader has mapped; reads through an older
// view stay in bounds.
TEST_P(VaultTest, ReadsThroughAnOldViewStayInBoundsWhenTheSlotMoves) {
  seal(0, 5, 100'000);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots()[0];
  vault_->reserveSlot(0, 100, 100, 10'000, 40 << 20);
  EXPECT_FALSE(reader.stillSealed(view));
  uint64_t sum = 0;
  for (uint64_t i = 0; i < view.payload_bytes; i += 512) {
    sum += static_cast<uint64_t>(reader.payload(view)[i]);
  }
  EXPECT_EQ(sum, 0u) << "a hole reads as zeros";
  EXPECT_FALSE(reader.verify(view).empty() && reader.stillSealed(view));
  EXPECT_THROW(reader.objects(view), Corruption);
  EXPECT_THROW(reader.table(view), Corruption);
}

TEST_P(VaultTest, OverwritingEndsAViewAtOnce) {
  seal(0, 5);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots()[0];
  begin(0, 6, 10'000, 'y', "objects");
  EXPECT_FALSE(reader.stillSealed(view));
  EXPECT_TRUE(reader.slots().empty()) << "a slot in writing is absent";
  EXPECT_EQ(reader.rawSlots()[0].state, SlotState::kWriting);
  vault_->sealSlot(0, {}, 1);
  EXPECT_FALSE(reader.stillSealed(view)) << "sealed again, but another snapshot";
  EXPECT_EQ(reader.slots()[0].step, 6);
}

TEST_P(VaultTest, ClearedSlotIsAbsent) {
  seal(0, 5);
  vault_->clearSlot(0);
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
}

TEST_P(VaultTest, ObjectsThatDoNotFitAreRefused) {
  seal(0, 5, 1000, 'x', "small");
  EXPECT_FALSE(vault_->putObjects(0, std::string(vault_->objectCapacity(0) + 1, 'o')));
  EXPECT_TRUE(vault_->putObjects(0, std::string(vault_->objectCapacity(0), 'o')));
}

TEST_P(VaultTest, ManyGroupsKeepTheFirstDigests) {
  begin(0, 5, 10, 'x', "");
  vault_->sealSlot(0, std::vector<uint64_t>(kMaxGroupDigests + 5, 3), 1);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().at(0).group_digests.size(), kMaxGroupDigests);
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

TEST_P(VaultTest, RejectsWrongMagicVersionAndChecksum) {
  const auto open = [&] { VaultReader reader(vault_->fd()); };
  flip(0);
  EXPECT_NE(messageOf(open).find("not a vault"), std::string::npos);
  flip(0);
  write<uint32_t>(8, kVaultVersion + 1);
  EXPECT_NE(messageOf(open).find("format version " + std::to_string(kVaultVersion + 1)),
            std::string::npos);
  write<uint32_t>(8, kVaultVersion);
  EXPECT_EQ(messageOf(open), "");
  // Every bit of what the checksum covers.
  for (uint64_t at = 0; at < offsetof(Superblock, extents); ++at) {
    flip(at);
    EXPECT_NE(messageOf(open), "") << "byte " << at;
    flip(at);
  }
}

TEST_P(VaultTest, FlippedExtentMakesTheSlotAbsentOnly) {
  seal(0, 5);
  seal(1, 6);
  for (uint64_t at = 0; at < sizeof(SlotExtent); ++at) {
    flip(offsetof(Superblock, extents) + at);
    const auto slots = VaultReader(vault_->fd()).slots();
    ASSERT_EQ(slots.size(), 1u);
    EXPECT_EQ(slots[0].step, 6);
    flip(offsetof(Superblock, extents) + at);
  }
}

TEST_P(VaultTest, FlippedSlotHeaderMakesTheSlotAbsent) {
  seal(0, 5);
  const uint64_t base = extent(0).offset;
  for (uint64_t at = 0; at < sizeof(SlotHeader); ++at) {
    flip(base + at);
    EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty()) << "byte " << at;
    flip(base + at);
  }
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 1u);
}

TEST_P(VaultTest, FlippedTableOrObjectsMakeTheSlotAbsent) {
  seal(0, 5);
  const uint64_t base = extent(0).offset;
  for (const uint64_t at : {field(0, offsetof(SlotHeader, table_offset)) + 3,
                            field(0, offsetof(SlotHeader, objects_offset)) + 3}) {
    flip(base + at);
    EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
    flip(base + at);
  }
}

TEST_P(VaultTest, ObjectsDamagedAfterTheViewAreRefused) {
  seal(0, 5);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots()[0];
  flip(extent(0).offset + field(0, offsetof(SlotHeader, objects_offset)));
  EXPECT_THROW(reader.objects(view), Corruption);
  flip(extent(0).offset + field(0, offsetof(SlotHeader, table_offset)) + 20);
  EXPECT_THROW(reader.table(view), Corruption);
}

TEST_P(VaultTest, FlippedPayloadIsNamedByOffset) {
  seal(0, 5, 3 * kChunk + 100);
  flip(extent(0).offset + field(0, offsetof(SlotHeader, payload_offset)) + 2 * kChunk + 17);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots().at(0);
  const auto faults = reader.verify(view);
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].payload_offset, 2 * kChunk);
  EXPECT_NE(faults[0].expected, faults[0].found);
  EXPECT_TRUE(reader.verify(view, 0, 2 * kChunk).empty());
  EXPECT_EQ(reader.verify(view, 2 * kChunk + 50, 2 * kChunk + 51).size(), 1u);
  EXPECT_TRUE(reader.verify(view, 3 * kChunk).empty());
}

TEST_P(VaultTest, RejectsHeadersThatPointOutsideTheirSlotThoughTheChecksumFits) {
  seal(0, 5);
  const uint64_t base = extent(0).offset;
  for (const size_t at :
       {offsetof(SlotHeader, table_offset), offsetof(SlotHeader, table_bytes),
        offsetof(SlotHeader, objects_offset), offsetof(SlotHeader, objects_bytes),
        offsetof(SlotHeader, chunk_hashes_offset), offsetof(SlotHeader, chunk_count),
        offsetof(SlotHeader, payload_offset), offsetof(SlotHeader, payload_bytes)}) {
    const auto old = read<uint64_t>(base + at);
    for (const uint64_t value :
         {extent(0).bytes, ~uint64_t{0}, uint64_t{1} << 63, (uint64_t{1} << 63) + 8}) {
      write<uint64_t>(base + at, value);
      resign(0);
      EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty())
          << "field at " << at << " value " << value;
    }
    write<uint64_t>(base + at, old);
  }
  resign(0);
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 1u);
}

// payload_bytes + chunk_bytes - 1 wrapped around: no checksum was expected, and one behind the slot
// was read.
TEST_P(VaultTest, RejectsAChunkSizeThatWrapsAround) {
  seal(0, 5);
  const uint64_t base = extent(0).offset;
  write<uint64_t>(base + offsetof(SlotHeader, chunk_bytes), ~uint64_t{0});
  write<uint64_t>(base + offsetof(SlotHeader, chunk_count), 0);
  resign(0);
  EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
}

TEST(VaultReader, RejectsForeignAndShortFiles) {
  UniqueFd memory(::memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_THROW(VaultReader(memory.get()), Corruption) << "empty";
  ASSERT_EQ(::ftruncate(memory.get(), 1 << 20), 0);
  EXPECT_THROW(VaultReader(memory.get()), Corruption) << "zeros";
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_THROW(VaultReader(null.get()), Corruption);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  EXPECT_THROW(VaultReader{pipe[0]}, Corruption);
  ::close(pipe[0]);
  ::close(pipe[1]);
  EXPECT_THROW(VaultReader(-1), SystemError);
}

TEST(VaultReader, RejectsAMemfdThatCanShrink) {
  const auto vault = Vault::create(kIdentity, 2, 64);
  UniqueFd copy(::memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  std::vector<char> bytes(vault->bytes());
  ASSERT_EQ(::pread(vault->fd(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  ASSERT_EQ(::pwrite(copy.get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  EXPECT_NE(messageOf([&] { VaultReader reader(copy.get()); }).find("shrinking"),
            std::string::npos);
  ASSERT_EQ(::fcntl(copy.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(messageOf([&] { VaultReader reader(copy.get()); }), "");
  EXPECT_NE(::ftruncate(vault->fd(), 4096), 0) << "the vault itself cannot shrink";
}

TEST(VaultFile, TruncatedIsRejectedAndSlotsBeyondTheEndAreAbsent) {
  char name[] = "/tmp/reft-vault-test-XXXXXX";
  const std::string directory = ::mkdtemp(name);
  auto vault = Vault::create(kIdentity, 1, 64, directory + "/vault");
  const uint64_t fixed = vault->bytes();
  vault->reserveSlot(0, 100, 100, 4, 4 * kChunk);
  vault->beginSlot(0, 1, 1, "", hashBytes("", 0), kChunk, 0, 0);
  vault->sealSlot(0, {}, 1);
  VaultReader reader(vault->fd());
  EXPECT_EQ(reader.slots().size(), 1u);
  ASSERT_EQ(::ftruncate(vault->fd(), static_cast<off_t>(fixed + kPage)), 0);
  EXPECT_THROW(reader.refresh(), Corruption);
  EXPECT_TRUE(VaultReader(vault->fd()).slots().empty());
  ASSERT_EQ(::ftruncate(vault->fd(), static_cast<off_t>(fixed - kPage)), 0);
  EXPECT_THROW(VaultReader(vault->fd()), Corruption);
  ASSERT_EQ(::ftruncate(vault->fd(), 100), 0);
  EXPECT_THROW(VaultReader(vault->fd()), Corruption);
  std::filesystem::remove_all(directory);
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

}  // namespace
}  // namespace reft
