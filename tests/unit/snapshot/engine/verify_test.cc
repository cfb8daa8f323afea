#include "snapshot/engine/verify.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace reft {
namespace verify_test {

constexpr uint64_t kChunk = 4096;

class Counters final : public VersionReader {
 public:
  uint64_t version(size_t region) const noexcept override { return values[region]; }
  std::array<uint64_t, 3> values{};
};

// An early region and two others, with their copy.
class VerifyTest : public testing::Test {
 protected:
  void SetUp() override {
    std::vector<RegionInfo> regions = {{"early", "uint8", {kChunk}, kChunk, 1, -1, true},
                                       {"a", "uint8", {50'000}, 50'000, 1, -1, false},
                                       {"b", "uint8", {300}, 300, 1, -1, false}};
    for (const RegionInfo& region : regions) {
      data_.emplace_back(region.bytes, static_cast<std::byte>(data_.size() + 1));
    }
    plan_ = std::make_shared<const SnapshotPlan>(
        buildTable(0, 1, std::move(regions), {}, "none", {}, kChunk));
    for (const auto& bytes : data_) {
      addresses_.push_back(bytes.data());
    }
  }
  std::vector<std::byte> copy() const {
    std::vector<std::byte> payload(plan_->table.payload_bytes);
    for (const Piece& piece : plan_->table.pieces) {
      std::memcpy(payload.data() + piece.payload_offset, data_[piece.region].data() + piece.begin,
                  piece.end - piece.begin);
    }
    return payload;
  }
  std::unique_ptr<Verify> sampled(bool full = false, std::vector<int> devices = {}) {
    auto verify = std::make_unique<Verify>(plan_, 7, full);
    verify->sample(addresses_, devices, counters_);
    return verify;
  }

  std::vector<std::vector<std::byte>> data_;
  std::vector<const std::byte*> addresses_;
  std::shared_ptr<const SnapshotPlan> plan_;
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

TEST_F(VerifyTest, ACopyOfTheProgramPointIsClean) {
  const auto verify = sampled();
  verify->copied(1);
  verify->compareVersions();
  verify->compareSamples(copy().data());
  EXPECT_TRUE(verify->late().empty());
}

TEST_F(VerifyTest, ACounterThatMovedMakesItsRegionLate) {
  const auto verify = sampled();
  ++counters_->values[2];
  verify->compareVersions();
  EXPECT_EQ(verify->late(), std::vector<uint32_t>{2});
}

TEST_F(VerifyTest, ACounterIsLookedAtAfterEachCopyToo) {
  const auto verify = sampled();
  ++counters_->values[1];
  verify->copied(1);
  EXPECT_EQ(verify->late(), std::vector<uint32_t>{1});
}

TEST_F(VerifyTest, EarlyRegionsMayMove) {
  const auto verify = sampled();
  ++counters_->values[0];
  verify->copied(0);
  verify->compareVersions();
  std::vector<std::byte> other = copy();
  std::fill_n(other.begin(), kChunk, std::byte{99});
  verify->compareSamples(other.data());
  EXPECT_TRUE(verify->late().empty());
}

TEST_F(VerifyTest, TheCountersAreGivenBackOnceCompared) {
  const auto verify = sampled();
  EXPECT_EQ(counters_.use_count(), 2);
  verify->compareVersions();
  EXPECT_EQ(counters_.use_count(), 1);
  ++counters_->values[1];
  verify->compareVersions();
  EXPECT_TRUE(verify->late().empty());
}

TEST_F(VerifyTest, WritesPastTheCountersShowInTheSamples) {
  for (const bool full : {false, true}) {
    const auto verify = sampled(full);
    std::vector<std::byte> other = copy();
    std::fill(other.begin() + kChunk, other.end(), std::byte{99});
    verify->compareSamples(other.data());
    EXPECT_EQ(verify->late(), (std::vector<uint32_t>{1, 2}));
  }
}

TEST_F(VerifyTest, OneByteShowsWhenEverythingIsHashed) {
  const auto verify = sampled(/*full=*/true);
  std::vector<std::byte> other = copy();
  other[kChunk + 20'001] ^= std::byte{1};
  verify->compareSamples(other.data());
  EXPECT_EQ(verify->late(), std::vector<uint32_t>{1});
}

TEST_F(VerifyTest, SamplesAreSkippedForALateSnapshot) {
  const auto verify = sampled();
  ++counters_->values[2];
  verify->compareVersions();
  std::vector<std::byte> other(plan_->table.payload_bytes);
  verify->compareSamples(other.data());
  EXPECT_EQ(verify->late(), std::vector<uint32_t>{2});
}

TEST_F(VerifyTest, RegionsOnDevicesAreNotSampled) {
  const auto verify = sampled(/*full=*/true, {-1, 0, -1});
  std::vector<std::byte> other = copy();
  other[kChunk + 100] ^= std::byte{1};
  verify->compareSamples(other.data());
  EXPECT_TRUE(verify->late().empty());
}

TEST_F(VerifyTest, ThreadsReportLateRegionsTogether) {
  const auto verify = sampled();
  ++counters_->values[1];
  ++counters_->values[2];
  std::thread other([&] {
    for (int i = 0; i < 100; ++i) {
      verify->copied(1);
    }
  });
  for (int i = 0; i < 100; ++i) {
    verify->copied(2);
  }
  other.join();
  EXPECT_EQ(verify->late().size(), 200u);
}

TEST(GroupDigestsTest, AreEqualForEqualBytesAndUnknownOnDevices) {
  const auto plan = [](int rank, bool own) {
    std::vector<RegionInfo> regions = {{"x", "uint8", {900}, 900, 1, 0, false},
                                       {"y", "uint8", {500}, 500, 1, 0, false}};
    if (own) {
      regions.insert(regions.begin() + 1, {"own", "uint8", {70}, 70, 1, -1, false});
    }
    return SnapshotPlan(
        buildTable(rank, 2, std::move(regions), {{"g", {0, 1}}}, "none", {}, kChunk));
  };
  std::vector<std::byte> x(900, std::byte{1});
  std::vector<std::byte> own(70, std::byte{2});
  std::vector<std::byte> y(500, std::byte{3});
  const std::vector<const std::byte*> both = {x.data(), y.data()};
  const std::vector<const std::byte*> three = {x.data(), own.data(), y.data()};
  const auto digests = groupDigests(plan(0, false), both, {}, 5);
  ASSERT_EQ(digests.size(), 1u);
  EXPECT_EQ(groupDigests(plan(1, true), three, {}, 5), digests);
  EXPECT_NE(groupDigests(plan(0, false), both, {}, 6), digests);
  const std::vector<int> devices = {0, -1};
  EXPECT_EQ(groupDigests(plan(0, false), both, devices, 5), std::vector<uint64_t>{0});
  std::fill(y.begin(), y.end(), std::byte{4});
  EXPECT_NE(groupDigests(plan(0, false), both, {}, 5), digests);
}

// Of a group of so many bytes, the steps, from 1 on, until the digests have covered every byte.
int64_t stepsToCoverAll(uint64_t bytes, int64_t stride) {
  std::map<uint64_t, uint64_t> seen;
  uint64_t covered = 0;
  int64_t step = 1;
  for (; covered < bytes; step += stride) {
    const DigestPart part = digestPart(bytes, step);
    EXPECT_LT(part.begin, part.end);
    EXPECT_LE(part.end, bytes);
    if (seen.emplace(part.begin, part.end).second) {
      covered += part.end - part.begin;
    }
    if (step > 1'000'000) {
      return -1;
    }
  }
  return step - 1;
}

TEST(DigestPartTest, EveryByteHasItsTurn) {
  EXPECT_EQ(stepsToCoverAll(100, 1), 1);
  EXPECT_LE(stepsToCoverAll(64 << 10, 1), 2 * 4);
  EXPECT_LE(stepsToCoverAll(uint64_t{1} << 30, 1), 2 * 2048);
  for (const int64_t stride : {2, 3, 4, 8, 16, 64, 100, 128, 640}) {
    for (const uint64_t bytes : {uint64_t{32} << 10, uint64_t{64} << 10, uint64_t{100} << 10,
                                 uint64_t{256} << 10, uint64_t{1} << 20}) {
      const int64_t steps = stepsToCoverAll(bytes, stride);
      EXPECT_GT(steps, 0) << "every " << stride << " steps, " << bytes << " bytes";
    }
  }
  EXPECT_EQ(digestPart(0, 7).end, 0u);
}

// Of three regions, one of which is empty, so that parts lie across them.
TEST(GroupDigestsTest, FindAnyByteOfTheStepsPart) {
  constexpr uint64_t kFirst = 300'001;
  constexpr uint64_t kBytes = uint64_t{1} << 20;
  const auto plan = [](int rank) {
    return SnapshotPlan(
        buildTable(rank, 2,
                   {{"x", "uint8", {kFirst}, kFirst, 1, 0, false},
                    {"none", "uint8", {0}, 0, 0, 0, false},
                    {"y", "uint8", {kBytes - kFirst}, kBytes - kFirst, 1, 0, false}},
                   {{"g", {0, 1}}}, "none", {}, kChunk));
  };
  const SnapshotPlan first = plan(0);
  const SnapshotPlan second = plan(1);
  const std::vector<std::byte> right(kBytes, std::byte{1});
  std::vector<std::byte> wrong = right;
  const auto parted = [](const std::vector<std::byte>& of) {
    return std::vector<const std::byte*>{of.data(), of.data(), of.data() + kFirst};
  };
  constexpr int64_t kSteps = 64;
  int64_t found_by_samples = 0;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const DigestPart part = digestPart(kBytes, step);
    const DigestPart other = digestPart(kBytes, step + 1);
    for (const uint64_t at : {part.begin, (part.begin + part.end) / 2, part.end - 1}) {
      wrong[at] ^= std::byte{16};
      EXPECT_NE(groupDigests(first, parted(right), {}, step),
                groupDigests(second, parted(wrong), {}, step))
          << "step " << step << ", byte " << at;
      wrong[at] ^= std::byte{16};
    }
    wrong[other.begin + 777] ^= std::byte{16};  // samples may have it, this part has not
    found_by_samples += groupDigests(first, parted(right), {}, step) !=
                        groupDigests(second, parted(wrong), {}, step);
    wrong[other.begin + 777] ^= std::byte{16};
  }
  EXPECT_LT(found_by_samples, kSteps / 4) << "samples alone would do";
}

}  // namespace verify_test
}  // namespace reft
