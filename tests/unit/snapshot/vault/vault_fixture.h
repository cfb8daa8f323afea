// What the tests of writer and reader share: a vault whose bytes a test may change.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "snapshot/state/table.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/writer.h"

namespace reft {

constexpr uint64_t kChunk = 4096;
inline const VaultIdentity kIdentity{"job", 1, 4};

inline std::string messageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Corruption& error) {
    return error.what();
  }
  return "";
}

// A vault in memory (false) or in a file (true), with raw access to its bytes.
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
        "none", {}, kChunk);
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

}  // namespace reft
