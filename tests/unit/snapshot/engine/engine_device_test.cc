// The engine with regions on (stand-in) devices. The canary of most tests: right after the gate the
// training stream overwrites everything, as an optimizer does; a copy that was overtaken would have
// sealed the poison.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "intercept/base/error.h"
#include "snapshot/device/replica_lines.h"
#include "snapshot/engine/engine.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "tests/fakes/cuda/driver.h"

// Random interleavings for each policy.
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitized = true;
constexpr int kInterleavings = 60;
#elif defined(__SANITIZE_ADDRESS__)
constexpr bool kThreadSanitized = false;
constexpr int kInterleavings = 250;
#else
constexpr bool kThreadSanitized = false;
constexpr int kInterleavings = 2500;
#endif

namespace reft {
namespace engine_device_test {

using namespace std::chrono_literals;
constexpr uint64_t kChunk = 4096;
constexpr uint64_t kInc = 5;
constexpr unsigned char kPoison = 0xEE;
constexpr int kModeGlobal = 0;

class Counters final : public VersionReader {
 public:
  explicit Counters(size_t regions) : values_(regions) {}
  uint64_t version(size_t region) const noexcept override { return values_[region].load(); }
  void bump(size_t region) { ++values_[region]; }

 private:
  std::vector<std::atomic<uint64_t>> values_;
};

// A region, on a device or (-1) on the host.
struct Place {
  uint64_t bytes;
  int device = 0;
  bool early = false;
};

class EngineDevice : public testing::Test {
 protected:
  void SetUp() override {
    fake_.heal();
    fake_.hold(0);
    fake_.setJitter(0, 1);
    fake_.setCopyRate(0);
  }
  void TearDown() override {
    fake_.hold(0);
    fake_.heal();
    engine_.reset();
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].device >= 0) {
        onDevice(places_[i].device);
        ok(fake_.memFree(reinterpret_cast<cuda::Pointer>(addresses_[i])));
      }
    }
    for (const DeviceStream& one : streams_) {
      onDevice(one.device);
      ok(fake_.api.streamDestroy(one.stream));
    }
    ok(fake_.api.ctxSetCurrent(nullptr));
  }
  static void ok(cuda::Result result) {
    ASSERT_EQ(result, cuda::kSuccess) << FakeCuda::instance().api.describe(result);
  }
  void onDevice(int device) {
    if (contexts_.count(device) == 0) {
      ok(fake_.api.devicePrimaryCtxRetain(&contexts_[device], device));
    }
    ok(fake_.api.ctxSetCurrent(contexts_[device]));
  }

  // An engine that hears of each of its votes that everybody agreed.
  void makeEngine(EngineOptions options) {
    options.incarnation = kInc;
    options.cuda = &fake_.api;
    engine_.reset();
    vault_ = Vault::create({"job", 0, 1}, 2, 64);
    engine_ =
        std::make_unique<SnapshotEngine>(options, *vault_, [this](const wire::Ballot& ballot) {
          {
            const std::lock_guard lock(mutex_);
            votes_.push_back(ballot);
          }
          voter_->outcome(ballot);
        });
    voter_ = engine_.get();
  }

  void start(const std::vector<Place>& places, EngineOptions options = {}) {
    makeEngine(options);
    std::vector<RegionInfo> regions;
    for (const Place& place : places) {
      regions.push_back({"r" + std::to_string(regions.size()),
                         "uint8",
                         {static_cast<int64_t>(place.bytes)},
                         place.bytes,
                         1,
                         -1,
                         place.early});
      void* address = nullptr;
      if (place.device < 0) {
        host_.emplace_back(place.bytes);
        address = host_.back().data();
      } else {
        onDevice(place.device);
        cuda::Pointer found = 0;
        ok(fake_.memAlloc(&found, place.bytes));
        address = reinterpret_cast<void*>(found);
        if (std::none_of(streams_.begin(), streams_.end(),
                         [&](const DeviceStream& s) { return s.device == place.device; })) {
          streams_.push_back({place.device, nullptr});
          ok(fake_.api.streamCreate(&streams_.back().stream, cuda::kStreamNonBlocking, 0));
        }
      }
      addresses_.push_back(address);
      devices_.push_back(place.device);
      places_.push_back(place);
    }
    table_ = buildTable(0, 1, std::move(regions), {}, "none", {}, kChunk);
    engine_->setTable(table_);
  }

  // What the training does with its memory: enqueued, not awaited.
  void writeAll(unsigned char value) {
    for (size_t i = 0; i < places_.size(); ++i) {
      write(i, value);
    }
  }
  void write(size_t region, unsigned char value) {
    if (places_[region].device < 0) {
      std::memset(const_cast<void*>(addresses_[region]), value, places_[region].bytes);
      return;
    }
    onDevice(places_[region].device);
    ok(fake_.memsetD8(reinterpret_cast<cuda::Pointer>(addresses_[region]), value,
                      places_[region].bytes, streamOf(places_[region].device)));
  }
  cuda::Stream streamOf(int device) const {
    return std::find_if(streams_.begin(), streams_.end(),
                        [&](const DeviceStream& s) { return s.device == device; })
        ->stream;
  }
  CaptureInput inputOf(int64_t step) const {
    CaptureInput input;
    input.step = step;
    input.addresses = addresses_;
    input.devices = devices_;
    input.streams = streams_;
    input.objects = "small";
    return input;
  }
  CaptureResult capture(int64_t step, std::shared_ptr<const VersionReader> versions = nullptr,
                        bool gated = true) {
    CaptureInput input = inputOf(step);
    input.gated = gated;
    input.versions = std::move(versions);
    return engine_->capture(input);
  }
  // Steps 2 to 8 are snapshots of their program points, though replays write all regions right
  // behind these, before any gate.
  void sealAmongReplays() {
    for (int64_t step = 2; step <= 8; ++step) {
      engine_->beginPoint(step, streams_);
      writeAll(static_cast<unsigned char>(step));
      ASSERT_EQ(capture(step), CaptureResult::kTaken) << vault_->stats().note;
      engine_->endPoint();
      writeAll(kPoison);  // a replay
      engine_->gate(streams_);
      ASSERT_TRUE(engine_->settle());
      ASSERT_TRUE(sealed(step).has_value()) << vault_->stats().note;
      EXPECT_TRUE(regionIs(*sealed(step), 0, static_cast<unsigned char>(step)));
    }
  }
  // The sealed snapshot of `step`; nullopt if there is none.
  std::optional<SlotView> sealed(int64_t step) {
    const VaultReader reader(vault_->fd());
    for (const SlotView& view : reader.slots()) {
      if (view.step == step) {
        EXPECT_TRUE(reader.verify(view).empty());
        return view;
      }
    }
    return std::nullopt;
  }
  // Whether each byte of a region, as it was sealed, is `value`.
  bool regionIs(const SlotView& view, uint32_t region, unsigned char value) {
    const VaultReader reader(vault_->fd());
    const auto* const payload = reinterpret_cast<const unsigned char*>(reader.payload(view));
    for (const Piece& piece : table_.pieces) {
      if (piece.region == region &&
          !std::all_of(payload + piece.payload_offset,
                       payload + piece.payload_offset + (piece.end - piece.begin),
                       [&](unsigned char byte) { return byte == value; })) {
        return false;
      }
    }
    return true;
  }
  int64_t stat(const std::atomic<uint64_t>& value) const {
    return static_cast<int64_t>(value.load());
  }

  const FakeCuda& fake_ = FakeCuda::instance();
  std::map<int, cuda::Context> contexts_;
  std::mutex mutex_;
  std::vector<wire::Ballot> votes_;
  std::unique_ptr<Vault> vault_;
  std::vector<std::vector<unsigned char>> host_;
  std::vector<const void*> addresses_;
  std::vector<int> devices_;
  std::vector<Place> places_;
  std::vector<DeviceStream> streams_;
  SnapshotTable table_;
  SnapshotEngine* voter_ = nullptr;  // for its threads: engine_ is empty before it has joined them
  std::unique_ptr<SnapshotEngine> engine_;
};

TEST_F(EngineDevice, SealsWhatWasThereAtTheProgramPoint) {
  start({{30'000}, {5'000}});
  for (int64_t step = 1; step <= 5; ++step) {
    writeAll(static_cast<unsigned char>(step));
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    engine_->gate(streams_);
    writeAll(kPoison);
    ASSERT_TRUE(engine_->settle());
    const auto view = sealed(step);
    ASSERT_TRUE(view.has_value()) << "step " << step;
    EXPECT_TRUE(regionIs(*view, 0, static_cast<unsigned char>(step)));
    EXPECT_TRUE(regionIs(*view, 1, static_cast<unsigned char>(step)));
  }
  EXPECT_EQ(stat(vault_->stats().sealed), 5);
}

// Each replica saves another shard: unless what they have in common is compared, a restore mixes
// replicas that have parted.
TEST_F(EngineDevice, ReplicasAreComparedByLinesThatTravelWithTheSnapshot) {
  start({{200'000}, {3'000, -1}, {70'000}, {500}});
  const auto digest = [&](int64_t step, int rank, std::vector<int> groups, unsigned char value) {
    std::vector<RegionInfo> regions = table_.regions;
    for (size_t r = 0; r < regions.size(); ++r) {
      regions[r].group = groups[r];
    }
    EngineOptions options;
    makeEngine(options);
    engine_->setTable(buildTable(rank, 2, regions, {{"g", {0, 1}}}, "none", {}, kChunk));
    writeAll(value);
    EXPECT_EQ(capture(step), CaptureResult::kTaken) << vault_->stats().note;
    engine_->gate(streams_);
    writeAll(kPoison);
    EXPECT_TRUE(engine_->settle());
    const auto view = sealed(step);
    return view ? view->group_digests.at(0) : 0;
  };
  const uint64_t first = digest(1, 0, {0, 0, 0, 0}, 7);
  EXPECT_NE(first, 0u);
  EXPECT_EQ(digest(1, 1, {0, 0, 0, 0}, 7), first);
  EXPECT_NE(digest(1, 1, {0, 0, 0, 0}, 8), first);
  EXPECT_NE(digest(2, 0, {0, 0, 0, 0}, 7), first);
  // What is a rank's own is not compared.
  const uint64_t without = digest(3, 0, {0, -1, -1, -1}, 7);
  EXPECT_NE(without, 0u);
  EXPECT_EQ(digest(3, 1, {0, -1, -1, -1}, 7), without);
}

TEST_F(EngineDevice, ARankWithoutReplicasComparesNothing) {
  start({{200'000}});
  std::vector<RegionInfo> regions = table_.regions;
  regions[0].group = 0;
  table_ = buildTable(0, 1, regions, {{"g", {0}}}, "none", {}, kChunk);
  engine_->setTable(table_);
  writeAll(3);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->gate(streams_);
  ASSERT_TRUE(engine_->settle());
  EXPECT_EQ(sealed(1)->group_digests.at(0), 0u);
}

// That the canary can bite: without the gate the poison is in the copy.
TEST_F(EngineDevice, ACopyThatIsNotHeldBackForIsOvertaken) {
  if (kThreadSanitized) {
    GTEST_SKIP() << "a data race on purpose, which the sanitizer finds";
  }
  start({{256 << 10}});
  DeviceCopy copy(fake_.api);
  std::vector<std::byte> to(512 << 10);
  auto* const pinned =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(to.data()) + 4095) / 4096 * 4096);
  writeAll(1);
  ASSERT_TRUE(copy.begin(streams_)) << copy.why();
  ASSERT_TRUE(copy.pin(pinned, 256 << 10));
  fake_.setCopyRate(2 << 20);  // an eighth of a second
  ASSERT_TRUE(copy.copy(0, pinned, addresses_[0], 256 << 10));
  DeviceCopy::Ticket ticket;
  ASSERT_TRUE(copy.submit(0, ticket));
  write(0, kPoison);
  while (!copy.landed(ticket)) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(static_cast<unsigned char>(pinned[(256 << 10) - 1]), kPoison);
}

// A step whose stream waits for another one, as for a message: 4 ms of work, a wait until 14 ms, 4
// ms of work.
class EngineDeviceGaps : public EngineDevice {
 protected:
  void SetUp() override {
    EngineDevice::SetUp();
    fake_.setKernelUs(0);
    fake_.setContention(0);
  }
  void TearDown() override {
    engine_.reset();
    if (other_ != nullptr) {
      onDevice(0);
      ok(fake_.api.streamSynchronize(other_));
      ok(fake_.api.streamSynchronize(streams_[0].stream));
      ok(fake_.api.eventDestroy(event_));
      ok(fake_.api.streamDestroy(other_));
    }
    fake_.setKernelUs(0);
    EngineDevice::TearDown();
  }
  void begin(uint64_t bytes, EngineOptions options = {}) {
    options.policy = PlacementPolicy::kGap;
    options.device_marks = &marks_;
    start({{bytes}}, options);
    onDevice(0);
    ok(fake_.api.streamCreate(&other_, cuda::kStreamNonBlocking, 0));
    ok(fake_.api.eventCreate(&event_, cuda::kEventDisableTiming));
  }
  void kernel(cuda::Stream stream, uint64_t us) {
    fake_.setKernelUs(us);
    ok(fake_.launch(
        stream, [](void*) {}, nullptr));
    fake_.setKernelUs(0);
  }
  // The host enqueues it and goes on.
  void step(int64_t number, bool wait = true) {
    writeAll(static_cast<unsigned char>(number));
    ASSERT_EQ(capture(number), CaptureResult::kTaken);
    const DeviceStream training = streams_[0];
    ok(fake_.api.eventRecord(event_, training.stream));
    ok(fake_.api.streamWaitEvent(other_, event_, 0));
    kernel(training.stream, 4000);
    kernel(other_, 14'000);
    ok(fake_.api.eventRecord(event_, other_));
    if (wait) {
      marks_.markWait(
          {.what = OpEvent::kWaitBegin, .kind = OpKind::kRecv, .peer = 1, .ticket = 7, .bytes = 64},
          training);
      ok(fake_.api.streamWaitEvent(training.stream, event_, 0));
      marks_.markWait(
          {.what = OpEvent::kWaitEnd, .kind = OpKind::kRecv, .peer = 1, .ticket = 7, .bytes = 64},
          training);
    }
    kernel(training.stream, 4000);
    engine_->gate(streams_);
    writeAll(kPoison);
  }

  DeviceMarks marks_;
  cuda::Stream other_ = nullptr;
  cuda::Event event_ = nullptr;
};

// Behind which wait is DevicePlacement's matter, and tested with it: how soon a gap is relied on
// depends on how evenly this machine runs.
TEST_F(EngineDeviceGaps, SealsWhatWasThereWhereverItIsCopied) {
  begin(64 * kChunk);
  fake_.setCopyRate(64 * kChunk * 200);  // all of it takes 5 ms of the 10
  const RankStats& stats = vault_->stats();
  constexpr int64_t kSteps = 60;
  for (int64_t number = 1; number <= kSteps; ++number) {
    step(number);  // the host is ahead of the device: nothing is awaited
  }
  ASSERT_TRUE(engine_->settle());
  EXPECT_EQ(stat(stats.sealed), kSteps);
  EXPECT_EQ(stats.bytes_copied.load(), static_cast<uint64_t>(kSteps) * 64 * kChunk);
  const auto view = sealed(kSteps);
  ASSERT_TRUE(view.has_value());
  EXPECT_TRUE(regionIs(*view, 0, static_cast<unsigned char>(kSteps)));
  EXPECT_EQ(marks_.lost(), 0u);
}

TEST_F(EngineDeviceGaps, AWaitThatDoesNotComeLeavesTheCopyToTheGate) {
  begin(64 * kChunk);
  fake_.setCopyRate(64 * kChunk * 200);
  int64_t number = 0;
  while (number < 12) {
    step(++number);
  }
  for (int more = 0; more < 6; ++more) {
    step(++number, /*wait=*/false);
    ASSERT_TRUE(engine_->settle());
    const auto view = sealed(number);
    ASSERT_TRUE(view.has_value());
    EXPECT_TRUE(regionIs(*view, 0, static_cast<unsigned char>(number)));
  }
}

// Random interleavings: jitter, rates, steps with and without the wait, the host far ahead or not.
TEST_F(EngineDeviceGaps, NoCopyReadsWhatTheOptimizerWrites) {
  begin(40 * kChunk);
  std::mt19937_64 random(5);
  int64_t in_gaps = 0;
  for (int64_t number = 1; number <= kInterleavings / 25; ++number) {
    fake_.setJitter(random() % 3 == 0 ? 0 : 1 + random() % 300, random());
    fake_.setCopyRate(random() % 3 == 0 ? 0 : (10 + random() % 40) << 20);
    if (random() % 16 == 0) {
      fake_.hold(1);
    }
    step(number, random() % 8 != 0);
    fake_.hold(0);
    ASSERT_TRUE(engine_->settle());
    const auto view = sealed(number);
    ASSERT_TRUE(view.has_value()) << "step " << number << ": " << vault_->stats().note;
    ASSERT_TRUE(regionIs(*view, 0, static_cast<unsigned char>(number))) << "step " << number;
    in_gaps = stat(vault_->stats().gap_copied_bytes);
  }
  RecordProperty("bytes_in_gaps", std::to_string(in_gaps));
}

TEST_F(EngineDeviceGaps, WaitsAreMarkedFromTheProgramPointToTheGate) {
  begin(8 * kChunk);
  for (const PlacementPolicy policy :
       {PlacementPolicy::kGap, PlacementPolicy::kEager, PlacementPolicy::kSync}) {
    engine_->setPolicy(policy);
    const int64_t number = stat(vault_->stats().sealed) + 1;
    writeAll(1);
    ASSERT_EQ(capture(number), CaptureResult::kTaken);
    EXPECT_TRUE(marks_.watching());
    engine_->gate(streams_);
    EXPECT_FALSE(marks_.watching());
    ASSERT_TRUE(engine_->settle());
    EXPECT_EQ(stat(vault_->stats().sealed), number);
  }
}

// A model on a device that the script never made the current one, on its default stream.
TEST_F(EngineDeviceGaps, AnotherCurrentDeviceLosesNoMark) {
  begin(8 * kChunk);
  const cuda::Stream own = std::exchange(streams_[0].stream, nullptr);
  for (int64_t number = 1; number <= 3; ++number) {
    writeAll(static_cast<unsigned char>(number));
    onDevice(1);
    ASSERT_EQ(capture(number), CaptureResult::kTaken);
    EXPECT_TRUE(marks_.watching());
    engine_->gate(streams_);
    ASSERT_TRUE(engine_->settle());
    EXPECT_TRUE(sealed(number).has_value());
  }
  EXPECT_EQ(marks_.lost(), 0u);
  streams_[0].stream = own;
}

// Interleavings of training, copies and gate, at random, under every policy.
class EngineDeviceCanary
    : public EngineDevice,
      public testing::WithParamInterface<std::tuple<PlacementPolicy, uint32_t>> {};

TEST_P(EngineDeviceCanary, NoCopyReadsWhatTheOptimizerWrites) {
  const auto [policy, threads] = GetParam();
  EngineOptions options;
  options.policy = policy;
  options.device_copy_threads = threads;
  start({{40'000}, {3'000, -1}, {9'000, 0, true}, {20'000, 1}}, options);
  std::mt19937_64 random(17 + threads);
  const auto versions = std::make_shared<Counters>(places_.size());
  int64_t taken = 0;
  for (int64_t step = 1; step <= kInterleavings; ++step) {
    fake_.setJitter(random() % 4 == 0 ? 0 : 1 + random() % 60, random());
    fake_.setCopyRate(random() % 3 == 0 ? 100 << 20 : 0);
    const auto value = static_cast<unsigned char>(1 + step % 200);
    writeAll(value);
    ASSERT_EQ(capture(step, versions), CaptureResult::kTaken) << vault_->stats().note;
    write(2, kPoison);  // the early region: forward rewrites it
    if (random() % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    }
    engine_->gate(streams_);
    writeAll(kPoison);
    if (random() % 4 == 0) {  // the host runs ahead, until the next capture
      continue;
    }
    ASSERT_TRUE(engine_->settle());
    const auto view = sealed(step);
    ASSERT_TRUE(view.has_value()) << "step " << step << ": " << vault_->stats().note;
    for (uint32_t region = 0; region < places_.size(); ++region) {
      ASSERT_TRUE(regionIs(*view, region, value)) << "step " << step << " region " << region;
    }
    ++taken;
  }
  ASSERT_TRUE(engine_->settle());
  EXPECT_GT(taken, kInterleavings / 2);
  EXPECT_EQ(stat(vault_->stats().sealed), kInterleavings);
}
INSTANTIATE_TEST_SUITE_P(Policies, EngineDeviceCanary,
                         testing::Values(std::tuple{PlacementPolicy::kEager, 1u},
                                         std::tuple{PlacementPolicy::kEager, 3u},
                                         std::tuple{PlacementPolicy::kGap, 1u},
                                         std::tuple{PlacementPolicy::kSync, 1u}));

TEST_F(EngineDevice, TheHostNeverWaitsForAStreamAndOpensNoContext) {
  const uint64_t contexts_before = fake_.contexts();
  start({{40'000, 1}, {3'000, -1}});
  const std::vector<std::string> waits = {"cuStreamSynchronize", "cuEventSynchronize",
                                          "cuEventQuery", "cuCtxSynchronize"};
  std::vector<uint64_t> before;
  for (const std::string& name : waits) {
    before.push_back(fake_.calls(name.c_str()));
  }
  for (int64_t step = 1; step <= 20; ++step) {
    writeAll(static_cast<unsigned char>(step));
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    engine_->gate(streams_);
  }
  ASSERT_TRUE(engine_->settle());
  for (size_t i = 0; i < waits.size(); ++i) {
    EXPECT_EQ(fake_.calls(waits[i].c_str()), before[i]) << waits[i];
  }
  EXPECT_EQ(fake_.contexts() & ~contexts_before & ~uint64_t{2}, 0u);
  EXPECT_EQ(fake_.contexts() >> 2 & 1, 0u) << "a context on a device that nobody named";
}

TEST_F(EngineDevice, TheGateDoesNotMakeTheHostWait) {
  start({{200'000}});
  fake_.hold(1);  // the device does nothing
  writeAll(9);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->gate(streams_);
  writeAll(kPoison);
  EXPECT_TRUE(engine_->busyOnDevice());
  fake_.hold(0);
  ASSERT_TRUE(engine_->settle());
  EXPECT_FALSE(engine_->busyOnDevice());
  const auto view = sealed(1);
  ASSERT_TRUE(view.has_value());
  EXPECT_TRUE(regionIs(*view, 0, 9));
}

TEST_F(EngineDevice, TheHostsTimeIsNotTakenForThatOfADevicesStep) {
  EngineOptions options;
  options.control_every = 4;
  start({{20'000}}, options);
  for (int64_t step = 1; step <= 100; ++step) {
    engine_->beginPoint(step);
    writeAll(static_cast<unsigned char>(step));
    if (step % 2 == 0) {  // the others would be what there is to compare with
      ASSERT_EQ(capture(step), CaptureResult::kTaken);
    }
    engine_->endPoint();
    engine_->gate(streams_);
  }
  EXPECT_EQ(static_cast<int64_t>(vault_->stats().overhead_noise_ppm.load()), -1);
}

// A host that is ahead of its device waits for other things than the device does.
TEST_F(EngineDevice, TheHostsWaitsAreNotTakenForThoseOfTheDevice) {
  OpEvents events;
  EngineOptions options;
  options.policy = PlacementPolicy::kEager;
  options.events = &events;
  start({{64 * kChunk}}, options);
  for (int64_t step = 1; step <= 8; ++step) {
    writeAll(static_cast<unsigned char>(step));
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    const int64_t now_ns = SteadyClock::instance().nowNs();
    const auto ticket = static_cast<uint64_t>(step);
    events.push({.what = OpEvent::kWaitBegin,
                 .kind = OpKind::kRecv,
                 .peer = 1,
                 .ticket = ticket,
                 .at_ns = now_ns});
    events.push({.what = OpEvent::kWaitEnd,
                 .kind = OpKind::kRecv,
                 .peer = 1,
                 .ticket = ticket,
                 .at_ns = now_ns + 5'000'000});
    engine_->gate(streams_);
    ASSERT_TRUE(engine_->settle());
  }
  EXPECT_EQ(stat(vault_->stats().sealed), 8);
  EXPECT_EQ(stat(vault_->stats().foretold_gap_ns) + stat(vault_->stats().unforetold_gap_ns), 0);
  engine_.reset();  // before the events that it reads
}

TEST_F(EngineDevice, ADeviceThatHangsCostsSnapshotsNotTraining) {
  EngineOptions options;
  options.device_wait = 30ms;
  start({{60'000}}, options);
  fake_.hold(1);
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->gate(streams_);
  EXPECT_EQ(capture(2), CaptureResult::kFailed);
  EXPECT_NE(std::string(vault_->stats().note).find("has not finished copying"), std::string::npos);
  EXPECT_EQ(stat(vault_->stats().skipped), 1);
  EXPECT_THROW(engine_->setTable(table_), Unavailable);
}

TEST_F(EngineDevice, ADeviceThatGoesOnIsProtectedAgain) {
  EngineOptions options;
  options.device_wait = 30ms;
  start({{60'000}}, options);
  fake_.hold(1);
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->gate(streams_);
  EXPECT_EQ(capture(2), CaptureResult::kFailed);
  fake_.hold(0);
  while (!engine_->settle()) {
  }
  EXPECT_TRUE(sealed(1).has_value());
  writeAll(3);
  EXPECT_EQ(capture(3), CaptureResult::kTaken);
  while (!engine_->settle()) {
  }
  EXPECT_TRUE(sealed(3).has_value());
}

TEST_F(EngineDevice, AnEngineEndsWhileItsDeviceHangs) {
  start({{60'000}});
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  fake_.hold(1);
  engine_->gate(streams_);
  engine_.reset();
}

// Each call that a snapshot makes fails once, for that call alone or for good: training is told
// nothing, nothing wrong is sealed.
TEST_F(EngineDevice, AnErrorEndsSnapshotsNotTraining) {
  const std::vector<const char*> functions = {
      "cuDevicePrimaryCtxRetain",   "cuCtxGetStreamPriorityRange",
      "cuStreamCreateWithPriority", "cuEventCreate",
      "cuMemHostRegister_v2",       "cuMemHostGetDevicePointer_v2",
      "cuStreamIsCapturing",        "cuEventRecord",
      "cuStreamWaitEvent",          "cuMemcpyDtoHAsync_v2",
      "cuStreamWriteValue32_v2"};
  start({{60'000}, {2'000, -1}});
  int failures = 0;
  for (const char* const function : functions) {
    for (const int sticky : {0, 1}) {
      for (const uint64_t after : {1, 2, 5}) {
        makeEngine({});
        engine_->setTable(table_);
        for (const DeviceStream& one : streams_) {
          ok(fake_.api.streamSynchronize(one.stream));
        }
        fake_.fail(function, after, 700, sticky);
        bool ended = false;
        for (int64_t step = 1; step <= 6; ++step) {
          if (!ended) {
            fake_.memsetD8(reinterpret_cast<cuda::Pointer>(addresses_[0]),
                           static_cast<unsigned char>(step), 60'000, streams_[0].stream);
          }
          const CaptureResult result = capture(step);
          EXPECT_FALSE(ended && result == CaptureResult::kTaken) << function;
          engine_->gate(streams_);
          EXPECT_TRUE(engine_->settle()) << function;
          if (result == CaptureResult::kTaken && !sealed(step).has_value()) {
            ended = true;
          }
          ended = ended || result == CaptureResult::kFailed;
          if (const auto view = sealed(step); view.has_value()) {
            EXPECT_TRUE(regionIs(*view, 0, static_cast<unsigned char>(step)))
                << function << " step " << step;
          }
        }
        failures += ended ? 1 : 0;
        fake_.heal();
      }
    }
  }
  // Each function is called at least once in the first steps, and its failure noticed.
  EXPECT_GE(failures, static_cast<int>(functions.size()) * 2);
}

TEST_F(EngineDevice, AStepThatIsCapturedIntoAGraphIsLeftAlone) {
  start({{20'000}});
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->gate(streams_);
  ASSERT_TRUE(engine_->settle());
  ok(fake_.beginCapture(streams_[0].stream, kModeGlobal));
  write(0, 2);
  EXPECT_EQ(capture(2), CaptureResult::kFailed);
  EXPECT_NE(std::string(vault_->stats().note).find("graph"), std::string::npos);
  engine_->gate(streams_);
  void* graph = nullptr;
  ok(fake_.endCapture(streams_[0].stream, &graph));
  ASSERT_NE(graph, nullptr);
  ok(fake_.destroyGraph(graph));
  writeAll(3);
  EXPECT_EQ(capture(3), CaptureResult::kTaken);
  ASSERT_TRUE(engine_->settle());
  EXPECT_TRUE(sealed(3).has_value());
}

// What the driver says of the legacy stream then, and nothing is broken by it.
TEST_F(EngineDevice, ACaptureThatForbidsTheLegacyStreamCostsOneSnapshot) {
  start({{20'000}});
  writeAll(1);
  fake_.fail("cuStreamIsCapturing", 1, cuda::kCaptureImplicit, 0);
  EXPECT_EQ(capture(1), CaptureResult::kFailed);
  EXPECT_NE(std::string(vault_->stats().note).find("graph"), std::string::npos);
  EXPECT_EQ(capture(2), CaptureResult::kTaken);
  ASSERT_TRUE(engine_->settle());
  EXPECT_TRUE(sealed(2).has_value());
}

TEST_F(EngineDevice, ASnapshotWhoseGateIsCapturedIsDropped) {
  start({{20'000}});
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  ok(fake_.beginCapture(streams_[0].stream, kModeGlobal));
  engine_->gate(streams_);
  void* graph = nullptr;
  ok(fake_.endCapture(streams_[0].stream, &graph));
  ok(fake_.destroyGraph(graph));
  ASSERT_TRUE(engine_->settle());
  // It may have been sealed before the capture began; what is not may not be sealed afterwards.
  EXPECT_EQ(stat(vault_->stats().sealed) + stat(vault_->stats().dropped), 1);
}

// Its copy would begin in the gate: not when the gate is captured.
TEST_F(EngineDevice, ACaptureAfterAControlStepIsNotBroken) {
  EngineOptions options;
  options.control_every = 1;
  DeviceMarks marks;
  options.device_marks = &marks;
  start({{20'000}}, options);
  for (int64_t step = 1; step <= 5; ++step) {
    engine_->beginPoint(step, streams_);
    writeAll(static_cast<unsigned char>(step));
    ASSERT_EQ(capture(step), CaptureResult::kTaken);
    engine_->endPoint();
    if (step < 5) {
      engine_->gate(streams_);
    }
  }
  ok(fake_.beginCapture(streams_[0].stream, kModeGlobal));
  write(0, kPoison);
  engine_->gate(streams_);
  void* graph = nullptr;
  ok(fake_.endCapture(streams_[0].stream, &graph));
  ASSERT_NE(graph, nullptr);
  ok(fake_.destroyGraph(graph));
  ASSERT_TRUE(engine_->settle());
  EXPECT_EQ(stat(vault_->stats().dropped), 1);
  engine_->beginPoint(6, streams_);
  writeAll(6);
  EXPECT_EQ(capture(6), CaptureResult::kTaken) << vault_->stats().note;
  engine_->endPoint();
  engine_->gate(streams_);
  ASSERT_TRUE(engine_->settle());
  ASSERT_TRUE(sealed(6).has_value());
  EXPECT_TRUE(regionIs(*sealed(6), 0, 6));
  engine_.reset();  // before the marks
}

// A program point that reft.step() marks has no gate: what comes behind it on the device comes
// behind the copy.
TEST_F(EngineDevice, WithoutAGateTheDeviceWaitsForTheCopy) {
  for (const uint32_t control_every : {0u, 1u}) {
    for (const PlacementPolicy policy : {PlacementPolicy::kGap, PlacementPolicy::kEager}) {
      EngineOptions options;
      options.control_every = control_every;
      options.policy = policy;
      DeviceMarks marks;
      options.device_marks = &marks;
      start({{200'000}, {3'000, -1}, {9'000, 0, true}}, options);
      fake_.setCopyRate(20 << 20);
      for (int64_t step = 1; step <= 12; ++step) {
        engine_->beginPoint(step, streams_);
        writeAll(static_cast<unsigned char>(step));
        ASSERT_EQ(capture(step, nullptr, /*gated=*/false), CaptureResult::kTaken)
            << vault_->stats().note;
        engine_->endPoint();
        write(0, kPoison);
        write(2, kPoison);
        ASSERT_TRUE(engine_->settle());
        const auto view = sealed(step);
        ASSERT_TRUE(view.has_value()) << "step " << step << ": " << vault_->stats().note;
        for (const uint32_t region : {0u, 1u, 2u}) {
          EXPECT_TRUE(regionIs(*view, region, static_cast<unsigned char>(step)))
              << "step " << step << " of " << region;
        }
      }
      TearDown();
      addresses_.clear();
      devices_.clear();
      places_.clear();
      streams_.clear();
    }
  }
}

// A graph that holds the optimizer's step may be replayed after a step that was not captured:
// nobody tells when the state is written then.
TEST_F(EngineDevice, OnceAStepWasCapturedNoCopyIsLeftToAGate) {
  EngineOptions options;
  options.policy = PlacementPolicy::kGap;
  options.control_every = 1;
  DeviceMarks marks;
  options.device_marks = &marks;
  start({{200'000}}, options);
  fake_.setCopyRate(20 << 20);
  engine_->beginPoint(1, streams_);
  ok(fake_.beginCapture(streams_[0].stream, kModeGlobal));
  ASSERT_EQ(capture(1), CaptureResult::kFailed);
  void* graph = nullptr;
  ok(fake_.endCapture(streams_[0].stream, &graph));
  ok(fake_.destroyGraph(graph));
  engine_->endPoint();
  sealAmongReplays();
  engine_.reset();  // before the marks
}

// A loss that is kept, a counter: written by the next op, long before the gate.
TEST_F(EngineDevice, PartsOfTheObjectsAreThoseOfTheProgramPoint) {
  for (const PlacementPolicy policy :
       {PlacementPolicy::kGap, PlacementPolicy::kEager, PlacementPolicy::kSync}) {
    EngineOptions options;
    options.policy = policy;
    start({{300'000}, {70'000}, {4'000, -1}}, options);
    fake_.setCopyRate(20 << 20);
    fake_.setJitter(300, 5);
    const std::string objects(6'000, 'o');
    cuda::Pointer loss = 0;  // no region: those are copied later, and this is written at once
    ok(fake_.memAlloc(&loss, 5'000));
    for (int64_t step = 1; step <= 30; ++step) {
      const auto value = static_cast<unsigned char>(step);
      writeAll(value);
      ok(fake_.memsetD8(loss, value, 5'000, streamOf(0)));
      const std::vector<ObjectPart> parts = {{reinterpret_cast<void*>(loss), 0, 10, 5'000},
                                             {addresses_[0], 0, 5'900, 4}};
      CaptureInput input = inputOf(step);
      input.objects = objects;
      input.parts = parts;
      ASSERT_EQ(engine_->capture(input), CaptureResult::kTaken) << vault_->stats().note;
      ok(fake_.memsetD8(loss, kPoison, 5'000, streamOf(0)));
      engine_->gate(streams_);
      writeAll(kPoison);
      ASSERT_TRUE(engine_->settle());
      const auto view = sealed(step);
      ASSERT_TRUE(view.has_value()) << vault_->stats().note;
      std::string expected = objects;
      std::fill_n(expected.begin() + 10, 5'000, static_cast<char>(value));
      std::fill_n(expected.begin() + 5'900, 4, static_cast<char>(value));
      EXPECT_EQ(VaultReader(vault_->fd()).objects(*view), expected);
    }
    ok(fake_.memFree(loss));
    TearDown();
    addresses_.clear();
    devices_.clear();
    places_.clear();
    streams_.clear();
  }
}

// A batch that is fetched ahead, a running sum: another stream writes it, and nobody waits for that
// stream at the program point.
TEST_F(EngineDevice, PartsThatAnotherStreamWritesAreThoseOfTheProgramPoint) {
  for (const PlacementPolicy policy :
       {PlacementPolicy::kGap, PlacementPolicy::kEager, PlacementPolicy::kSync}) {
    EngineOptions options;
    options.policy = policy;
    start({{30'000}}, options);
    fake_.setCopyRate(20 << 20);
    fake_.setJitter(500, 7);
    DeviceStream writer{0, nullptr};
    DeviceStream captured{0, nullptr};
    ok(fake_.api.streamCreate(&writer.stream, cuda::kStreamNonBlocking, 0));
    ok(fake_.api.streamCreate(&captured.stream, cuda::kStreamNonBlocking, 0));
    const std::string objects(4'000, 'o');
    cuda::Pointer batch = 0;  // no region: those are copied later, and this is written at once
    ok(fake_.memAlloc(&batch, objects.size()));
    const auto writes = [&](unsigned char value) {
      ok(fake_.memsetD8(batch, value, objects.size(), writer.stream));
    };
    for (int64_t step = 1; step <= 30; ++step) {
      ok(fake_.beginCapture(captured.stream, 2));
      const auto value = static_cast<unsigned char>(step);
      write(0, value);
      for (unsigned char other = 0; other < 5; ++other) {
        writes(static_cast<unsigned char>(kPoison -
                                          other));  // so that it is behind the stream that trains
      }
      writes(value);
      const ObjectPart part{reinterpret_cast<void*>(batch), 0, 0, objects.size()};
      const std::vector<DeviceStream> writers = {captured, writer};
      CaptureInput input = inputOf(step);
      input.objects = objects;
      input.parts = {&part, 1};
      input.writers = writers;
      ASSERT_EQ(engine_->capture(input), CaptureResult::kTaken) << vault_->stats().note;
      writes(kPoison);
      engine_->gate(streams_);
      ASSERT_TRUE(engine_->settle());
      const auto view = sealed(step);
      ASSERT_TRUE(view.has_value()) << vault_->stats().note;
      EXPECT_EQ(VaultReader(vault_->fd()).objects(*view),
                std::string(objects.size(), static_cast<char>(value)));
      void* graph = nullptr;
      ok(fake_.endCapture(captured.stream, &graph));
      ok(fake_.destroyGraph(graph));
      ok(fake_.api.streamSynchronize(writer.stream));
    }
    ok(fake_.api.streamDestroy(writer.stream));
    ok(fake_.api.streamDestroy(captured.stream));
    ok(fake_.memFree(batch));
    TearDown();
    addresses_.clear();
    devices_.clear();
    places_.clear();
    streams_.clear();
  }
}

// Another model's stream, whose optimizer steps in every other iteration only (it accumulates
// gradients): its forward writes buffers in each.
TEST_F(EngineDevice, AStreamThatHasNotSteppedInThisIterationIsWaitedFor) {
  EngineOptions options;
  options.policy = PlacementPolicy::kGap;
  start({{30'000}, {50'000, 0, true}}, options);
  fake_.setCopyRate(20 << 20);
  fake_.setJitter(500, 11);
  DeviceStream other{0, nullptr, true};
  ok(fake_.api.streamCreate(&other.stream, cuda::kStreamNonBlocking, 0));
  const std::array<DeviceStream, 1> stepping = {other};
  const auto forward = [&](unsigned char value) {
    ok(fake_.memsetD8(reinterpret_cast<cuda::Pointer>(addresses_[1]), value, places_[1].bytes,
                      other.stream));
  };
  for (int64_t step = 1; step <= 30; ++step) {
    const auto value = static_cast<unsigned char>(step);
    write(0, value);
    for (unsigned char before = 0; before < 5; ++before) {
      forward(static_cast<unsigned char>(kPoison -
                                         before));  // so that it is behind the stream that trains
    }
    forward(value);
    if (step % 2 == 1) {
      engine_->gate(stepping);
    }
    engine_->beginPoint(step, streams_);
    ASSERT_EQ(capture(step), CaptureResult::kTaken) << vault_->stats().note;
    engine_->endPoint();
    forward(kPoison);
    engine_->gate(streams_);
    ASSERT_TRUE(engine_->settle());
    const auto view = sealed(step);
    ASSERT_TRUE(view.has_value()) << vault_->stats().note;
    EXPECT_TRUE(regionIs(*view, 0, value)) << step;
    EXPECT_TRUE(regionIs(*view, 1, value)) << step;
  }
  ok(fake_.api.streamSynchronize(other.stream));
  engine_.reset();
  ok(fake_.api.streamDestroy(other.stream));
}

// A stream that may be destroyed is not touched after the program point behind its gate.
TEST_F(EngineDevice, AStreamThatDoesNotLastIsForgotten) {
  start({{30'000}});
  DeviceStream other{0, nullptr};
  ok(fake_.api.streamCreate(&other.stream, cuda::kStreamNonBlocking, 0));
  const std::array<DeviceStream, 1> stepping = {other};
  engine_->gate(stepping);
  for (int64_t step = 1; step <= 3; ++step) {
    engine_->beginPoint(step, streams_);
    writeAll(static_cast<unsigned char>(step));
    ASSERT_EQ(capture(step), CaptureResult::kTaken) << vault_->stats().note;
    engine_->endPoint();
    if (step == 1) {
      ok(fake_.api.streamDestroy(other.stream));
    }
    engine_->gate(streams_);
    ASSERT_TRUE(engine_->settle());
    EXPECT_TRUE(sealed(step).has_value()) << vault_->stats().note;
  }
}

TEST_F(EngineDevice, AStepThatIsCapturedIsLeftOutAndLaterOnesAreAtOnce) {
  EngineOptions options;
  options.policy = PlacementPolicy::kGap;
  start({{200'000}}, options);
  fake_.setCopyRate(20 << 20);
  engine_->leaveOut(1);
  EXPECT_EQ(stat(vault_->stats().skipped), 1);
  sealAmongReplays();
}

TEST_F(EngineDevice, PartsThatLieElsewhereAreRefused) {
  start({{3'000}});
  for (const ObjectPart part :
       {ObjectPart{addresses_[0], 1, 0, 4}, ObjectPart{addresses_[0], 0, 3, 3},
        ObjectPart{addresses_[0], 0, 6, 1}, ObjectPart{addresses_[0], 0, 1, ~uint64_t{0}}}) {
    CaptureInput input = inputOf(stat(vault_->stats().errors) + 1);
    input.parts = {&part, 1};
    EXPECT_EQ(engine_->capture(input), CaptureResult::kFailed);
  }
  EXPECT_EQ(stat(vault_->stats().errors), 4);
  writeAll(9);
  EXPECT_EQ(capture(9), CaptureResult::kTaken);
  engine_->gate(streams_);
  ASSERT_TRUE(engine_->settle());
  EXPECT_TRUE(sealed(9).has_value());
}

// What is written before the gate is copied before the point returns; so are lines of it, also by
// the replica that saves another shard.
TEST_F(EngineDevice, LinesOfWhatIsWrittenEarlyAreThoseOfTheProgramPoint) {
  start({{200'000, 0, true}});
  std::vector<RegionInfo> regions = table_.regions;
  regions[0].group = 0;
  regions[0].row_bytes = regions[0].bytes;  // not cut: one of the ranks saves nothing
  fake_.setCopyRate(20 << 20);
  fake_.setJitter(500, 3);
  for (int64_t step = 1; step <= 20; ++step) {
    std::vector<uint64_t> digests;
    for (int rank = 0; rank < 2; ++rank) {
      makeEngine({});
      engine_->setTable(buildTable(rank, 2, regions, {{"g", {0, 1}}}, "none", {}, kChunk));
      writeAll(static_cast<unsigned char>(step));
      ASSERT_EQ(capture(step), CaptureResult::kTaken);
      writeAll(kPoison);
      engine_->gate(streams_);
      ASSERT_TRUE(engine_->settle());
      ASSERT_TRUE(sealed(step).has_value());
      digests.push_back(sealed(step)->group_digests.at(0));
    }
    EXPECT_EQ(digests[0], digests[1]) << "step " << step;
    const std::vector<uint64_t> bytes = {200'000};
    const auto lines = replicaLines(bytes, static_cast<uint64_t>(step) * 0x9E3779B97F4A7C15ull);
    const std::vector<std::byte> there(lines.size() * ReplicaLine::kMostBytes,
                                       static_cast<std::byte>(step));
    EXPECT_EQ(digests[0], replicaDigest(lines, there.data(), static_cast<uint64_t>(step)))
        << "not the poison's";
  }
}

TEST_F(EngineDevice, DrainingDoesNotOutliveItsDeadlineWhileADeviceHangs) {
  start({{60'000}});
  fake_.hold(1);
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(engine_->drain(50ms));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s)
      << "not the five minutes that a capture waits";
  fake_.hold(0);
  EXPECT_TRUE(engine_->drain(60s)) << "and the snapshot was not given up";
  EXPECT_TRUE(sealed(1).has_value());
}

// model.to("cuda:1"): what was marked at the program point was another device's stream.
TEST_F(EngineDevice, StateThatMovesToAnotherDeviceIsProtectedThere) {
  DeviceMarks marks;
  EngineOptions options;
  options.device_marks = &marks;
  start({{20'000}, {20'000, 1}}, options);
  const std::vector<const void*> addresses = addresses_;
  const std::vector<int> devices = devices_;
  const std::vector<DeviceStream> streams = streams_;
  addresses_ = {addresses[0]};
  table_ =
      buildTable(0, 1, {{"r", "uint8", {20'000}, 20'000, 1, -1, false}}, {}, "none", {}, kChunk);
  engine_->setTable(table_);
  for (int64_t step = 1; step <= 6; ++step) {
    const size_t at = step <= 3 ? 0 : 1;
    const std::vector<DeviceStream> before = {
        streams[step <= 4 ? 0 : 1]};  // of the snapshot before
    engine_->beginPoint(step, step == 1 ? std::span<const DeviceStream>{} : before);
    addresses_ = {addresses[at]};
    devices_ = {devices[at]};
    streams_ = {streams[at]};
    onDevice(devices[at]);
    ok(fake_.memsetD8(reinterpret_cast<cuda::Pointer>(addresses[at]),
                      static_cast<unsigned char>(step), 20'000, streams[at].stream));
    ASSERT_EQ(capture(step), CaptureResult::kTaken) << vault_->stats().note;
    engine_->endPoint();
    engine_->gate(streams_);
    ASSERT_TRUE(engine_->settle());
    ASSERT_TRUE(sealed(step).has_value()) << "step " << step << ": " << vault_->stats().note;
    EXPECT_TRUE(regionIs(*sealed(step), 0, static_cast<unsigned char>(step)));
  }
  engine_.reset();  // before the marks
  addresses_ = addresses;
  devices_ = devices;
  streams_ = streams;
}

// A capture somewhere else in the process goes on undisturbed while snapshots are taken.
TEST_F(EngineDevice, SnapshotsBreakNobodysCapture) {
  start({{60'000}});
  cuda::Stream other = nullptr;
  onDevice(0);
  ok(fake_.api.streamCreate(&other, cuda::kStreamNonBlocking, 0));
  ok(fake_.beginCapture(other, kModeGlobal));
  for (int64_t step = 1; step <= 3; ++step) {
    writeAll(static_cast<unsigned char>(step));
    EXPECT_EQ(capture(step), CaptureResult::kTaken) << vault_->stats().note;
    engine_->gate(streams_);
    EXPECT_TRUE(engine_->settle());
    EXPECT_TRUE(sealed(step).has_value());
  }
  void* graph = nullptr;
  ok(fake_.endCapture(other, &graph));
  ok(fake_.destroyGraph(graph));
  ok(fake_.api.streamDestroy(other));
}

TEST_F(EngineDevice, WhatWasWrittenBetweenProgramPointAndGateIsDropped) {
  start({{20'000}, {20'000}});
  const auto versions = std::make_shared<Counters>(2);
  fake_.hold(1);  // so that the copy is not done before the write
  writeAll(1);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  versions->bump(1);  // that is how a write is known; the write itself would race with the copy, as
                      // it would in a job
  engine_->gate(streams_);
  fake_.hold(0);
  EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>{1});
  EXPECT_FALSE(sealed(1).has_value());
  EXPECT_EQ(stat(vault_->stats().dropped), 1);
}

TEST_F(EngineDevice, TheOptimizersOwnWritesAreNoLateOnes) {
  start({{200'000}});
  const auto versions = std::make_shared<Counters>(1);
  writeAll(1);
  ASSERT_EQ(capture(1, versions), CaptureResult::kTaken);
  fake_.setCopyRate(4 << 20);
  engine_->gate(streams_);
  versions->bump(0);
  writeAll(kPoison);
  engine_->gate(streams_);  // of another optimizer
  versions->bump(0);
  ASSERT_TRUE(engine_->settle());
  ASSERT_TRUE(sealed(1).has_value());
  EXPECT_TRUE(regionIs(*sealed(1), 0, 1));
}

TEST_F(EngineDevice, ASlotThatMovesIsPinnedAnew) {
  start({{20'000}});
  writeAll(1);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  engine_->gate(streams_);
  ASSERT_TRUE(engine_->settle());
  for (int64_t step = 2; step <= 5; ++step) {
    CaptureInput input;
    const std::string large(static_cast<size_t>(300 << 10) << step, 'x');
    input.step = step;
    input.addresses = addresses_;
    input.devices = devices_;
    input.streams = streams_;
    input.objects = large;
    writeAll(static_cast<unsigned char>(step));
    ASSERT_EQ(engine_->capture(input), CaptureResult::kTaken) << vault_->stats().note;
    engine_->gate(streams_);
    ASSERT_TRUE(engine_->settle());
    ASSERT_TRUE(sealed(step).has_value());
    EXPECT_TRUE(regionIs(*sealed(step), 0, static_cast<unsigned char>(step)));
  }
}

}  // namespace engine_device_test
}  // namespace reft
