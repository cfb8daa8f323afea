// What the engine relies on of a Copier, held against both implementations: regions in host memory,
// on a (stand-in) device, and on a device whose copies are placed by its marks.
//
// The canary of most cases: right after the point or the gate, training overwrites its memory; a
// copy that was overtaken holds the poison.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "snapshot/engine/device_copier.h"
#include "snapshot/engine/host_copier.h"
#include "snapshot/engine/snapshot_job.h"
#include "snapshot/engine/telemetry.h"
#include "snapshot/vault/hash.h"
#include "tests/fakes/cuda/driver.h"

namespace reft {
namespace {

using namespace std::chrono_literals;
constexpr uint64_t kChunk = 4096;
constexpr unsigned char kPoison = 0xEE;

enum class Side { kHost, kDevice, kPlacedDevice };

class Counters final : public VersionReader {
 public:
  explicit Counters(size_t regions) : values_(regions) {}
  uint64_t version(size_t region) const noexcept override { return values_[region].load(); }
  void bump(size_t region) { ++values_[region]; }

 private:
  std::vector<std::atomic<uint64_t>> values_;
};

struct Region {
  uint64_t bytes = 0;
  bool early = false;
  int32_t group = -1;
  bool on_host = false;  // on all sides
};

class CopierContract : public testing::TestWithParam<Side> {
 protected:
  void SetUp() override {
    fake_.heal();
    fake_.hold(0);
    fake_.setJitter(0, 1);
    fake_.setCopyRate(0);
    if (onDevice()) {
      ok(fake_.api.devicePrimaryCtxRetain(&cuda_, 0));
      ok(fake_.api.ctxSetCurrent(cuda_));
      streams_.push_back({0, nullptr});
      ok(fake_.api.streamCreate(&streams_[0].stream, cuda::kStreamNonBlocking, 0));
    }
  }
  void TearDown() override {
    fake_.hold(0);
    context_.stopping.store(true);
    job_.reset();
    tracker_.reset();
    marks_.reset();
    forget();
    for (const DeviceStream& one : streams_) {
      ok(fake_.api.streamDestroy(one.stream));
    }
    if (onDevice()) {
      ok(fake_.api.ctxSetCurrent(nullptr));
    }
  }
  static void ok(cuda::Result result) {
    ASSERT_EQ(result, cuda::kSuccess) << FakeCuda::instance().api.describe(result);
  }
  static bool onDevice() { return GetParam() != Side::kHost; }
  // Frees the regions.
  void forget() {
    job_.reset();
    tracker_.reset();
    for (size_t i = 0; i < addresses_.size(); ++i) {
      if (devices_[i] >= 0) {
        ok(fake_.memFree(reinterpret_cast<cuda::Pointer>(addresses_[i])));
      }
    }
    addresses_.clear();
    devices_.clear();
    host_.clear();
  }

  void state(const std::vector<Region>& regions, const std::vector<GroupInfo>& groups = {},
             const std::vector<std::vector<uint32_t>>& held = {}, uint64_t chunk = kChunk) {
    std::vector<RegionInfo> infos;
    for (const Region& one : regions) {
      infos.push_back({"r" + std::to_string(infos.size()),
                       "uint8",
                       {static_cast<int64_t>(one.bytes)},
                       one.bytes,
                       1,
                       one.group,
                       one.early});
      void* address = nullptr;
      const bool there = onDevice() && !one.on_host;
      if (there) {
        cuda::Pointer found = 0;
        ok(fake_.memAlloc(&found, one.bytes));
        address = reinterpret_cast<void*>(found);
      } else {
        host_.emplace_back(one.bytes);
        address = host_.back().data();
      }
      addresses_.push_back(address);
      devices_.push_back(there ? 0 : -1);
    }
    regions_ = regions;
    plan_ = std::make_shared<const SnapshotPlan>(
        buildTable(0, groups.empty() ? 1 : 4, std::move(infos), groups,
                   groups.empty() ? "none" : "aec", held, chunk));
    versions_ = std::make_shared<Counters>(regions.size());
    marks_ = GetParam() == Side::kPlacedDevice ? std::make_unique<DeviceMarks>() : nullptr;
    tracker_ = std::make_unique<DeviceTracker>(&fake_.api, marks_.get(), *vault_, clock_);
    vault_->reserveSlot(0, plan_->json.size(), 4096, plan_->chunk_count,
                        plan_->table.payload_bytes);
  }
  // As the thread that trains does: on a device it is enqueued, not awaited.
  void write(size_t region, unsigned char value) {
    if (devices_[region] >= 0) {
      ok(fake_.memsetD8(reinterpret_cast<cuda::Pointer>(addresses_[region]), value,
                        regions_[region].bytes, streams_[0].stream));
    } else {
      std::memset(const_cast<void*>(addresses_[region]), value, regions_[region].bytes);
    }
  }
  // Bytes as random as they come, which are returned.
  std::vector<unsigned char> fill(size_t region, std::mt19937_64& random) {
    std::vector<unsigned char> bytes(regions_[region].bytes);
    std::ranges::generate(bytes, [&] { return static_cast<unsigned char>(random()); });
    if (devices_[region] >= 0) {
      ok(fake_.api.memcpyHtoDAsync(reinterpret_cast<cuda::Pointer>(addresses_[region]),
                                   bytes.data(), bytes.size(), streams_[0].stream));
    } else {
      std::ranges::copy(bytes, static_cast<unsigned char*>(const_cast<void*>(addresses_[region])));
    }
    return bytes;
  }
  void writeAll(unsigned char value) {
    for (size_t i = 0; i < regions_.size(); ++i) {
      write(i, value);
    }
  }
  // The program point of `step`, as the engine walks through it.
  void capture(int64_t step, Copier::Wanted wanted = {}) {
    CaptureInput input;
    input.step = step;
    input.addresses = addresses_;
    input.versions = versions_;
    input.devices = devices_;
    input.streams = streams_;
    if (onDevice()) {
      ASSERT_EQ(tracker_->begin(streams_), DeviceTracker::Begun::kYes);
      tracker_->pointOf(step, streams_);
      ASSERT_TRUE(tracker_->pin(vault_->payload(0), vault_->payloadCapacity(0)));
    }
    vault_->beginSlot(0, step, 1, plan_->json, plan_->json_hash, plan_->table.chunk_bytes,
                      plan_->table.payload_bytes, plan_->chunk_count);
    ends_.store(0);
    job_ = std::make_shared<SnapshotJob>(SnapshotJob::Place{plan_, 0, 0}, input, false);
    if (onDevice()) {
      job_->copier = std::make_unique<DeviceCopier>(context_, *job_, *tracker_, input);
    } else {
      job_->copier = std::make_unique<HostCopier>(context_, *job_);
    }
    const Copier::Way way = job_->copier->way(wanted);
    job_->policy = way.policy;
    job_->control = way.control;
    job_->copier->atPoint();
    if (job_->policy == PlacementPolicy::kSync && job_->copier->hostWaits()) {
      job_->copier->copyRest();
    }
    tracker_->endPoint(1, !way.control, 0, 0);
  }
  // The bytes of the parity that this rank stores of a group with such contents.
  std::vector<unsigned char> parityOf(uint32_t group,
                                      const std::vector<std::vector<unsigned char>>& contents) {
    const ParityCells cells(plan_->table, static_cast<int32_t>(group), 0);
    std::vector<unsigned char> sum(cells.bytes());
    cells.eachUnder(0, 0, cells.bytes(), [&](const std::vector<ShardRange>& ranges) {
      size_t at = 0;
      for (const ShardRange& range : ranges) {
        for (uint64_t i = range.begin; i < range.end; ++i) {
          sum[at++] ^= contents[range.region][i];
        }
      }
    });
    return sum;
  }
  void gate() {
    tracker_->stepOn(streams_);
    job_->copier->gate(streams_);
  }
  // Whether the copy of a region holds `value` alone, and the slot's hashes fit.
  bool copyIs(size_t region, unsigned char value) const {
    const auto* const payload = reinterpret_cast<const unsigned char*>(vault_->payload(0));
    for (const Piece& piece : plan_->table.pieces) {
      if (piece.region == region &&
          !std::all_of(payload + piece.payload_offset,
                       payload + piece.payload_offset + (piece.end - piece.begin),
                       [&](unsigned char byte) { return byte == value; })) {
        return false;
      }
    }
    return true;
  }
  void expectCopy(unsigned char value) {
    EXPECT_TRUE(job_->copier->done());
    EXPECT_FALSE(job_->copier->hasWork());
    EXPECT_FALSE(job_->failed());
    EXPECT_EQ(ends_.load(), 1);
    EXPECT_TRUE(job_->checked());
    for (size_t i = 0; i < regions_.size(); ++i) {
      EXPECT_TRUE(copyIs(i, value)) << "region " << i;
    }
    for (uint64_t chunk = 0; chunk < plan_->chunk_count; ++chunk) {
      EXPECT_EQ(vault_->chunkHashes(0)[chunk],
                hashBytes(vault_->payload(0) + chunk * kChunk, plan_->chunkBytes(chunk)))
          << "chunk " << chunk;
    }
  }

  const FakeCuda& fake_ = FakeCuda::instance();
  cuda::Context cuda_ = nullptr;
  std::vector<DeviceStream> streams_;
  std::vector<std::vector<unsigned char>> host_;
  std::vector<Region> regions_;
  std::vector<const void*> addresses_;
  std::vector<int> devices_;
  std::shared_ptr<const SnapshotPlan> plan_;
  std::shared_ptr<Counters> versions_;

  const Clock& clock_ = SteadyClock::instance();
  std::unique_ptr<Vault> vault_ = Vault::create({"job", 0, 1}, 2, 64);
  Telemetry telemetry_{*vault_, 1};
  OpEvents events_;
  OpListener listener_{events_};
  std::atomic<int> ends_{0};
  CopyContext context_{.vault = *vault_,
                       .telemetry = telemetry_,
                       .clock = clock_,
                       .events = events_,
                       .listener = listener_,
                       .all_copied =
                           [this](SnapshotJob& job) {
                             ++ends_;
                             job.allCopied(job.atGate() || job.policy == PlacementPolicy::kSync);
                           },
                       .call_helpers = [] {},
                       .expect_replays = [] {}};
  std::unique_ptr<DeviceMarks> marks_;
  std::unique_ptr<DeviceTracker> tracker_;
  std::shared_ptr<SnapshotJob> job_;
};

TEST_P(CopierContract, TheGateAloneCopiesWhatWasThereAtThePoint) {
  state({{30'000}, {5'001}, {63}});
  for (int64_t step = 1; step <= 5; ++step) {
    const auto value = static_cast<unsigned char>(step);
    writeAll(value);
    capture(step);
    gate();
    writeAll(kPoison);
    job_->copier->copyRest();  // what a copy thread does behind the gate
    expectCopy(value);
  }
}

TEST_P(CopierContract, ThreadsThatCopyTogetherCopyEachChunkOnce) {
  state({{400'000}, {70'000}});
  for (int64_t step = 1; step <= 10; ++step) {
    const auto value = static_cast<unsigned char>(step);
    const uint64_t before = vault_->stats().bytes_copied.load();
    writeAll(value);
    capture(step);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] { job_->copier->copyRest(); });
    }
    gate();
    writeAll(kPoison);
    for (std::thread& thread : threads) {
      thread.join();
    }
    job_->copier->copyRest();
    job_->awaitCopied();
    expectCopy(value);
    EXPECT_EQ(vault_->stats().bytes_copied.load() - before, plan_->table.payload_bytes);
  }
}

TEST_P(CopierContract, EarlyRegionsAreSafeWhenThePointReturns) {
  state({{20'000, true}, {50'000}, {100, true}});
  for (int64_t step = 1; step <= 5; ++step) {
    const auto value = static_cast<unsigned char>(step);
    writeAll(value);
    capture(step);
    write(0, kPoison);
    write(2, kPoison);
    gate();
    writeAll(kPoison);
    job_->copier->copyRest();
    expectCopy(value);
  }
}

TEST_P(CopierContract, UnderSyncEverythingIsSafeWhenThePointReturns) {
  state({{60'000}, {5'000, true}});
  for (int64_t step = 1; step <= 5; ++step) {
    const auto value = static_cast<unsigned char>(step);
    writeAll(value);
    capture(step, {.policy = PlacementPolicy::kSync});
    writeAll(kPoison);
    job_->copier->copyRest();
    job_->awaitCopied();
    expectCopy(value);
  }
}

TEST_P(CopierContract, WithoutAGateNothingIsHeldBackForABetterMoment) {
  state({{60'000}});
  writeAll(1);
  capture(1, {.policy = PlacementPolicy::kGap, .gated = false});
  EXPECT_NE(job_->policy, PlacementPolicy::kGap);
  job_->copier->copyRest();
  job_->check();
  expectCopy(1);
}

TEST_P(CopierContract, AControlStepIsCopiedAtThePointOrAtTheGate) {
  state({{60'000}});
  writeAll(3);
  capture(1, {.policy = PlacementPolicy::kGap, .control = true});
  if (job_->control) {
    EXPECT_EQ(job_->copier->done(), job_->copier->hostWaits()) << "nothing beside the step";
  }
  EXPECT_EQ(job_->control, GetParam() != Side::kDevice) << "control steps need the device's times";
  gate();
  writeAll(kPoison);
  job_->copier->copyRest();
  expectCopy(3);
}

TEST_P(CopierContract, AFailedSnapshotEndsAndCopiesNoMore) {
  state({{90'000}});
  writeAll(1);
  capture(1);
  job_->fail();
  const uint64_t before = vault_->stats().bytes_copied.load();
  gate();
  job_->copier->copyRest();
  job_->awaitCopied();
  EXPECT_TRUE(job_->copier->done());
  EXPECT_EQ(ends_.load(), 1);
  EXPECT_EQ(vault_->stats().bytes_copied.load(), before);
  writeAll(2);
  capture(2);
  gate();
  writeAll(kPoison);
  job_->copier->copyRest();
  expectCopy(2);
}

TEST_P(CopierContract, TheSinkReceivesEachChunkThatWasCopied) {
  state({{9'000, true}, {90'000}});
  writeAll(1);
  capture(1);
  uint64_t bytes = 0;
  while (job_->copier->copyNext(Tier::kGap, [&](uint64_t more, Tier) { bytes += more; })) {
  }
  EXPECT_GE(bytes, plan_->table.payload_bytes - plan_->earlyBytes());
  EXPECT_LE(bytes, plan_->table.payload_bytes);
  gate();
  expectCopy(1);
}

TEST_P(CopierContract, PlacementEndsWhenItsJobIsReleased) {
  state({{200'000}});
  for (int64_t step = 1; step <= 5; ++step) {
    const auto value = static_cast<unsigned char>(step);
    writeAll(value);
    capture(step, {.policy = PlacementPolicy::kGap});
    std::thread first([&] { job_->copier->place(); });
    gate();
    writeAll(kPoison);
    job_->copier->copyRest();
    first.join();
    job_->awaitCopied();
    expectCopy(value);
  }
}

TEST_P(CopierContract, StoppingEndsAPlacementThatWaits) {
  state({{200'000}});
  writeAll(1);
  capture(1, {.policy = PlacementPolicy::kGap});
  std::thread first([&] { job_->copier->place(); });
  context_.stopping.store(true);
  context_.wake();
  first.join();
}

TEST_P(CopierContract, TheGateComparesTheVersions) {
  state({{20'000}, {20'000}});
  writeAll(1);
  capture(1);
  versions_->bump(1);
  gate();
  job_->copier->copyRest();
  job_->awaitCopied();
  ASSERT_TRUE(job_->checked());
  EXPECT_EQ(job_->verify.late().back(), 1u);
  EXPECT_EQ(versions_.use_count(), 1) << "given back";
}

TEST_P(CopierContract, TheOptimizersOwnWritesAreNotLate) {
  state({{20'000}});
  writeAll(1);
  capture(1);
  gate();
  versions_->bump(0);
  writeAll(kPoison);
  gate();  // another optimizer
  job_->copier->copyRest();
  expectCopy(1);
  EXPECT_TRUE(job_->verify.late().empty());
}

// Of regions of all alignments, in two groups, some of them on the host.
TEST_P(CopierContract, AParityIsTheXorOfTheOthersCellsAtThePoint) {
  const std::vector<GroupInfo> groups = {{"g", {0, 1, 2, 3}, {{2, 0, 3, 1}}},
                                         {"h", {0, 1}, {{1, 0}}}};
  std::mt19937_64 random(7);
  for (int round = 0; round < 12; ++round) {
    forget();
    std::vector<Region> regions;
    for (uint64_t i = 3 + random() % 8; i > 0; --i) {
      const uint64_t unit = std::array{1, 4, 16, 64}[random() % 4];
      regions.push_back({(1 + random() % (40'000 / unit)) * unit, random() % 4 == 0,
                         static_cast<int32_t>(random() % 3) - 1, random() % 3 == 0});
    }
    state(regions, groups, {{0, 4}, {0, 2}}, round % 4 == 0 ? 64 : kChunk);
    ASSERT_TRUE(!onDevice() || tracker_->prepareSum(0))
        << DeviceXor::hindrance(fake_.api, devices_);
    for (int64_t step = 1; step <= 3; ++step) {
      std::vector<std::vector<unsigned char>> contents;
      for (size_t i = 0; i < regions.size(); ++i) {
        contents.push_back(fill(i, random));
      }
      capture(step);
      gate();
      writeAll(kPoison);
      job_->copier->copyRest();
      ASSERT_FALSE(job_->failed());
      uint64_t bytes = 0;
      for (const ParityPiece& piece : plan_->table.parities) {
        const auto expected = parityOf(piece.group, contents);
        ASSERT_EQ(std::memcmp(vault_->payload(0) + piece.payload_offset,
                              expected.data() + piece.begin, piece.end - piece.begin),
                  0)
            << "round " << round << ", step " << step << ", group " << piece.group;
        bytes += piece.end - piece.begin;
      }
      EXPECT_EQ(bytes == 0, plan_->table.parities.empty());
      for (uint64_t chunk = 0; chunk < plan_->chunk_count; ++chunk) {
        ASSERT_EQ(vault_->chunkHashes(0)[chunk],
                  hashBytes(vault_->payload(0) + chunk * plan_->table.chunk_bytes,
                            plan_->chunkBytes(chunk)));
      }
    }
  }
}

// A copy from memory that is gone is refused; a kernel that read it would end all work there.
TEST_P(CopierContract, MemoryThatIsGoneUnderAParityEndsTheSnapshotAndNotTheDevice) {
  if (!onDevice()) {
    return;  // memory of the host that is gone: tests of LiveReader
  }
  state({{40'000, false, 0}, {40'000, false, 0}}, {{"g", {0, 1}, {{0, 1}}}}, {{0, 2}});
  ASSERT_FALSE(plan_->table.parities.empty());
  ASSERT_TRUE(tracker_->prepareSum(0));
  writeAll(1);
  capture(1);
  for (size_t i = 0; i < regions_.size(); ++i) {
    ok(fake_.memFree(reinterpret_cast<cuda::Pointer>(addresses_[i])));
    devices_[i] = -1;  // nothing is left to free
  }
  gate();
  job_->copier->copyRest();
  EXPECT_TRUE(job_->failed());
  cuda::Pointer other = 0;
  ok(fake_.memAlloc(&other, 64));
  ok(fake_.memsetD8(other, 1, 64, streams_[0].stream));
  ok(fake_.api.streamSynchronize(streams_[0].stream));
  ok(fake_.memFree(other));
}

TEST_P(CopierContract, AStateWithoutBytesHasNothingToCopy) {
  state({});
  capture(1);
  EXPECT_TRUE(job_->copier->done());
  EXPECT_FALSE(job_->copier->hasWork());
  EXPECT_FALSE(job_->copier->copyNext(Tier::kGap));
}

INSTANTIATE_TEST_SUITE_P(Sides, CopierContract,
                         testing::Values(Side::kHost, Side::kDevice, Side::kPlacedDevice),
                         [](const auto& tested) -> std::string {
                           switch (tested.param) {
                             case Side::kHost: return "Host";
                             case Side::kDevice: return "Device";
                             case Side::kPlacedDevice: return "PlacedDevice";
                           }
                           return "";
                         });

}  // namespace
}  // namespace reft
