#include "snapshot/vault/reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/op_log.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/writer.h"
#include "tests/unit/snapshot/vault/vault_fixture.h"

namespace reft {
namespace reader_test {

using VaultReaderTest = VaultTest;

INSTANTIATE_TEST_SUITE_P(Memory, VaultReaderTest, testing::Values(false));
INSTANTIATE_TEST_SUITE_P(File, VaultReaderTest, testing::Values(true));

TEST_P(VaultReaderTest, ReadsBackWhatWasSealed) {
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
  EXPECT_TRUE(reader.isUnchanged(slots[0]));
}

TEST_P(VaultReaderTest, HoldsASnapshotWithoutAByte) {
  seal(0, 5, 0, 'a', "");
  const VaultReader reader(vault_->fd());
  ASSERT_EQ(reader.slots().size(), 1u);
  EXPECT_EQ(reader.objects(reader.slots()[0]), "");
  EXPECT_TRUE(reader.verify(reader.slots()[0]).empty());
}

TEST_P(VaultReaderTest, CountersAndOpLogAreSeenByTheReader) {
  vault_->stats().steps.store(42);
  OpLog log(vault_->opLogArea(), 64);
  const VaultReader reader(vault_->fd());
  EXPECT_EQ(reader.stats().steps.load(), 42u);
  EXPECT_EQ(reader.opLogBytes(), vault_->opLogBytes());
  EXPECT_NO_THROW(OpLogReader(reader.opLogArea(), reader.opLogBytes()));
}

// The writer may move a slot behind the end of what the reader has mapped; reads through an older
// view stay in bounds.
TEST_P(VaultReaderTest, ReadsThroughAnOldViewStayInBoundsWhenTheSlotMoves) {
  seal(0, 5, 100'000);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots()[0];
  vault_->reserveSlot(0, 100, 100, 10'000, 40 << 20);
  EXPECT_FALSE(reader.isUnchanged(view));
  uint64_t sum = 0;
  for (uint64_t i = 0; i < view.payload_bytes; i += 512) {
    sum += static_cast<uint64_t>(reader.payload(view)[i]);
  }
  EXPECT_EQ(sum, 0u) << "a hole reads as zeros";
  EXPECT_FALSE(reader.verify(view).empty() && reader.isUnchanged(view));
  EXPECT_THROW(reader.objects(view), Corruption);
  EXPECT_THROW(reader.table(view), Corruption);
}

TEST_P(VaultReaderTest, OverwritingEndsAViewAtOnce) {
  seal(0, 5);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots()[0];
  begin(0, 6, 10'000, 'y', "objects");
  EXPECT_FALSE(reader.isUnchanged(view));
  EXPECT_TRUE(reader.slots().empty()) << "a slot in writing is absent";
  EXPECT_EQ(reader.rawSlots()[0].state, SlotState::kWriting);
  vault_->sealSlot(0, {}, 1);
  EXPECT_FALSE(reader.isUnchanged(view)) << "sealed again, but another snapshot";
  EXPECT_EQ(reader.slots()[0].step, 6);
}

TEST_P(VaultReaderTest, RejectsWrongMagicVersionAndChecksum) {
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

TEST_P(VaultReaderTest, FlippedExtentMakesTheSlotAbsentOnly) {
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

TEST_P(VaultReaderTest, FlippedSlotHeaderMakesTheSlotAbsent) {
  seal(0, 5);
  const uint64_t base = extent(0).offset;
  for (uint64_t at = 0; at < sizeof(SlotHeader); ++at) {
    flip(base + at);
    EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty()) << "byte " << at;
    flip(base + at);
  }
  EXPECT_EQ(VaultReader(vault_->fd()).slots().size(), 1u);
}

TEST_P(VaultReaderTest, FlippedTableOrObjectsMakeTheSlotAbsent) {
  seal(0, 5);
  const uint64_t base = extent(0).offset;
  for (const uint64_t at : {field(0, offsetof(SlotHeader, table_offset)) + 3,
                            field(0, offsetof(SlotHeader, objects_offset)) + 3}) {
    flip(base + at);
    EXPECT_TRUE(VaultReader(vault_->fd()).slots().empty());
    flip(base + at);
  }
}

TEST_P(VaultReaderTest, ObjectsDamagedAfterTheViewAreRefused) {
  seal(0, 5);
  const VaultReader reader(vault_->fd());
  const SlotView view = reader.slots()[0];
  flip(extent(0).offset + field(0, offsetof(SlotHeader, objects_offset)));
  EXPECT_THROW(reader.objects(view), Corruption);
  flip(extent(0).offset + field(0, offsetof(SlotHeader, table_offset)) + 20);
  EXPECT_THROW(reader.table(view), Corruption);
}

TEST_P(VaultReaderTest, FlippedPayloadIsNamedByOffset) {
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

TEST_P(VaultReaderTest, RejectsHeadersThatPointOutsideTheirSlotThoughTheChecksumFits) {
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
TEST_P(VaultReaderTest, RejectsAChunkSizeThatWrapsAround) {
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

// On tmpfs it has seals, as a memfd has, but not those that a memfd has to have.
TEST(VaultFile, OneThatHasLostItsNameIsStillAVault) {
  for (const char* folder : {"/dev/shm/", "/tmp/"}) {
    std::string name = std::string(folder) + "reft-vault-test-XXXXXX";
    const std::string directory = ::mkdtemp(name.data());
    const auto vault = Vault::create(kIdentity, 1, 64, directory + "/vault");
    ASSERT_EQ(::unlink((directory + "/vault").c_str()), 0);
    EXPECT_EQ(messageOf([&] { VaultReader reader(vault->fd()); }), "") << folder;
    ASSERT_EQ(::rmdir(directory.c_str()), 0);
  }
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

}  // namespace reader_test
}  // namespace reft
