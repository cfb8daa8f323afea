#include "snapshot/restore/comparison.h"

#include <gtest/gtest.h>

#include <cstring>

#include "intercept/base/error.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/writer.h"

namespace reft {
namespace comparison_test {

constexpr uint64_t kChunk = 4096;
constexpr int64_t kStep = 7;
constexpr uint64_t kIncarnation = 5;

// One rank with two private regions, sealed, and its live memory, which is equal at first.
class ComparisonTest : public ::testing::Test {
 protected:
  ComparisonTest() {
    for (size_t i = 0; i < 2; ++i) {
      memory_.emplace_back(10'000 + i * 8);
      for (size_t at = 0; at < memory_[i].size(); ++at) {
        memory_[i][at] = static_cast<std::byte>(at * 7 + i);
      }
    }
    std::vector<RegionInfo> infos;
    for (size_t i = 0; i < 2; ++i) {
      const uint64_t bytes = memory_[i].size();
      infos.push_back({name(i), "uint8", {static_cast<int64_t>(bytes)}, bytes, 1, -1, false});
    }
    table_ = buildTable(0, 1, infos, {}, "none", {}, kChunk);
    const std::string json = table_.toJson();
    const uint64_t chunks = (table_.payload_bytes + kChunk - 1) / kChunk;
    vault_ = Vault::create({"job", 0, 1}, 2, 64);
    vault_->reserveSlot(0, json.size(), 100, chunks, table_.payload_bytes);
    vault_->beginSlot(0, kStep, kIncarnation, json, hashBytes(json.data(), json.size()), kChunk,
                      table_.payload_bytes, chunks);
    vault_->putObjects(0, "small state");
    for (const Piece& piece : table_.pieces) {
      std::memcpy(vault_->payload(0) + piece.payload_offset,
                  memory_[piece.region].data() + piece.begin, piece.end - piece.begin);
    }
    for (uint64_t i = 0; i < chunks; ++i) {
      const uint64_t begin = i * kChunk;
      vault_->chunkHashes(0)[i] =
          hashBytes(vault_->payload(0) + begin, std::min(kChunk, table_.payload_bytes - begin));
    }
    vault_->sealSlot(0, {}, 1);
  }

  static std::string name(size_t i) { return "region" + std::to_string(i); }

  Comparison compareNow(bool on_device = false) {
    std::vector<LiveRegion> live;
    for (size_t i = 0; i < memory_.size(); ++i) {
      const uint64_t bytes = memory_[i].size();
      live.push_back({name(i),
                      "uint8",
                      {static_cast<int64_t>(bytes)},
                      bytes,
                      on_device ? nullptr : memory_[i].data()});
    }
    const SlotSource saved(vault_->fd(), 0, kStep, kIncarnation);
    return compare(saved, live, [&](size_t region, uint64_t begin, std::span<std::byte> into) {
      std::memcpy(into.data(), memory_[region].data() + begin, into.size());
    });
  }

  std::vector<std::vector<std::byte>> memory_;
  SnapshotTable table_;
  std::unique_ptr<Vault> vault_;
};

// What a rank leaves that dies while it copies.
class UnfinishedTest : public ComparisonTest {
 protected:
  // The second slot, which held step 6: a step is begun, and its first `chunks` chunks are copied.
  void begin(int64_t step, uint64_t chunks, bool objects) {
    const std::string json = table_.toJson();
    const uint64_t all = (table_.payload_bytes + kChunk - 1) / kChunk;
    vault_->reserveSlot(1, json.size(), 100, all, table_.payload_bytes);
    for (uint64_t i = 0; i < all; ++i) {  // what the older step left: whole chunks, whole hashes
      vault_->chunkHashes(1)[i] = hashBytes(vault_->payload(1) + i * kChunk,
                                            std::min(kChunk, table_.payload_bytes - i * kChunk));
    }
    vault_->beginSlot(1, step, kIncarnation, json, hashBytes(json.data(), json.size()), kChunk,
                      table_.payload_bytes, all);
    if (objects) {
      vault_->putObjects(1, "newer state");
    }
    for (uint64_t i = 0; i < chunks; ++i) {
      const uint64_t begin = i * kChunk;
      const uint64_t bytes = std::min(kChunk, table_.payload_bytes - begin);
      std::memcpy(vault_->payload(1) + begin, vault_->payload(0) + begin, bytes);
      vault_->chunkHashes(1)[i] = hashBytes(vault_->payload(1) + begin, bytes);
    }
  }

  Comparison compareWith(const SlotSource& saved) {
    std::vector<LiveRegion> live;
    for (size_t i = 0; i < memory_.size(); ++i) {
      const uint64_t bytes = memory_[i].size();
      live.push_back({name(i), "uint8", {static_cast<int64_t>(bytes)}, bytes, memory_[i].data()});
    }
    return compare(saved, live, nullptr);
  }
};

TEST_F(UnfinishedTest, OnlyChunksThatWereCopiedAreCompared) {
  begin(kStep + 1, 1, true);
  const auto saved = SlotSource::after(vault_->fd(), kStep, kIncarnation);
  ASSERT_NE(saved, nullptr);
  EXPECT_EQ(saved->step(), kStep + 1);
  EXPECT_EQ(saved->objects(), "newer state");
  const Comparison none = compareWith(*saved);
  EXPECT_EQ(none.compared_bytes, 0u) << "no piece lies in the first chunk alone";
  begin(kStep + 1, 3, true);
  const auto more = SlotSource::after(vault_->fd(), kStep, kIncarnation);
  const Comparison found = compareWith(*more);
  EXPECT_EQ(found.compared_bytes, memory_[0].size());
  EXPECT_EQ(found.left_out_bytes, memory_[1].size());
  EXPECT_TRUE(found.differences.empty());
  memory_[0][17] ^= std::byte{1};
  ASSERT_EQ(compareWith(*more).differences.size(), 1u);
  EXPECT_EQ(compareWith(*more).differences[0].first, 17u);
}

TEST_F(UnfinishedTest, ADifferenceSaysWhetherItsBytesAreThoseOfTheProgramPoint) {
  const auto isCertain = [&] {
    const auto saved = SlotSource::after(vault_->fd(), kStep, kIncarnation);
    return compareWith(*saved).differences.at(0).certain;
  };
  begin(kStep + 1, 3, true);
  memory_[0][17] ^= std::byte{1};
  EXPECT_FALSE(isCertain());
  table_.regions[0].early = true;
  begin(kStep + 1, 3, true);
  EXPECT_TRUE(isCertain()) << "copied before the step returned";
  table_.regions[0].early = false;
  begin(kStep + 1, 5, true);
  EXPECT_FALSE(isCertain());
  vault_->sealSlot(1, {}, 1);
  EXPECT_TRUE(isCertain()) << "late writes were looked for";
}

TEST_F(UnfinishedTest, SmallStateThatIsNotCompleteCountsAsNone) {
  begin(kStep + 1, 0, false);
  vault_->putObjectPart(1, 0, std::as_bytes(std::span<const char>("half", 4)));
  const auto saved = SlotSource::after(vault_->fd(), kStep, kIncarnation);
  ASSERT_NE(saved, nullptr);
  EXPECT_EQ(saved->objects(), "");
}

TEST_F(UnfinishedTest, OthersIncarnationsOlderStepsAndDroppedOnesAreNone) {
  begin(kStep + 1, 1, true);
  EXPECT_EQ(SlotSource::after(vault_->fd(), kStep, kIncarnation + 1), nullptr);
  EXPECT_EQ(SlotSource::after(vault_->fd(), kStep + 1, kIncarnation), nullptr);
  vault_->clearSlot(1);
  EXPECT_EQ(SlotSource::after(vault_->fd(), kStep, kIncarnation), nullptr);
}

TEST_F(UnfinishedTest, ASlotThatIsOverwrittenMeanwhileIsNotBelieved) {
  begin(kStep + 1, 3, true);
  const auto saved = SlotSource::after(vault_->fd(), kStep, kIncarnation);
  begin(kStep + 2, 0, true);
  EXPECT_THROW(compareWith(*saved), Corruption);
}

TEST_F(ComparisonTest, EqualMemoryHasNoDifferences) {
  for (const bool on_device : {false, true}) {
    const Comparison found = compareNow(on_device);
    EXPECT_TRUE(found.differences.empty());
    EXPECT_EQ(found.compared_bytes, memory_[0].size() + memory_[1].size());
    EXPECT_EQ(found.left_out_bytes, 0u);
  }
}

TEST_F(ComparisonTest, OneByteIsFoundAndItsPlaceIsTold) {
  for (const size_t at : {size_t{0}, size_t{4095}, size_t{4096}, memory_[1].size() - 1}) {
    memory_[1][at] ^= std::byte{1};
    for (const bool on_device : {false, true}) {
      const Comparison found = compareNow(on_device);
      ASSERT_EQ(found.differences.size(), 1u);
      const PieceDifference& one = found.differences[0];
      EXPECT_EQ(one.region, "region1");
      EXPECT_EQ(one.first, at);
      EXPECT_LE(one.sample_at, at);
      EXPECT_LT(at - one.sample_at, 16u);
      EXPECT_EQ(one.end - one.sample_at, one.sample.size());
      const std::byte saved = memory_[1][at] ^ std::byte{1};
      EXPECT_EQ(static_cast<std::byte>(one.sample[at - one.sample_at]), saved);
    }
    memory_[1][at] ^= std::byte{1};
  }
}

TEST_F(ComparisonTest, DamagedChunksAreLeftOutAndCounted) {
  for (const Piece& piece : table_.pieces) {
    if (piece.region == 0) {
      vault_->payload(0)[piece.payload_offset] ^= std::byte{1};
    }
  }
  const Comparison found = compareNow();
  EXPECT_TRUE(found.differences.empty());
  EXPECT_GE(found.left_out_bytes, memory_[0].size());
}

TEST_F(ComparisonTest, SamplesAreBoundedAndBeginAtTheDifference) {
  const size_t at = memory_[0].size() - 20;
  for (size_t i = at; i < memory_[0].size(); ++i) {
    memory_[0][i] ^= std::byte{1};
  }
  const Comparison found = compareNow();
  ASSERT_EQ(found.differences.size(), 1u);
  EXPECT_LE(found.differences[0].sample.size(), 36u);
}

TEST_F(ComparisonTest, RegionsOfAnotherSizeAreLeftOut) {
  memory_[0].resize(memory_[0].size() - 8);
  const Comparison found = compareNow();
  EXPECT_TRUE(found.differences.empty());
  EXPECT_EQ(found.compared_bytes, memory_[1].size());
}

TEST_F(ComparisonTest, LiveMemoryThatIsGoneIsLeftOut) {
  std::vector<LiveRegion> live;
  for (size_t i = 0; i < memory_.size(); ++i) {
    const uint64_t bytes = memory_[i].size();
    live.push_back({name(i), "uint8", {static_cast<int64_t>(bytes)}, bytes, memory_[i].data()});
  }
  live[0].memory = reinterpret_cast<std::byte*>(kChunk);  // never mapped
  const SlotSource saved(vault_->fd(), 0, kStep, kIncarnation);
  const Comparison found = compare(saved, live, nullptr);
  EXPECT_TRUE(found.differences.empty());
  EXPECT_EQ(found.compared_bytes, memory_[1].size());
  EXPECT_EQ(found.left_out_bytes, memory_[0].size());
}

}  // namespace comparison_test
}  // namespace reft
