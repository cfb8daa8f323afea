// Memory of regions that a script moves, unmaps or shrinks while it is copied: the process lives,
// the snapshot of that step is dropped, the next one is whole.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "snapshot/engine/engine.h"
#include "snapshot/vault/reader.h"

namespace reft {
namespace vanished_memory_test {

constexpr uint64_t kChunk = 64 << 10;
constexpr uint64_t kBytes = 1 << 20;

// Holds copy threads up once they have read their first block, until a test has acted.
class Places final : public VersionReader {
 public:
  uint64_t version(size_t /*region*/) const noexcept override { return 0; }
  bool stands(size_t region) const noexcept override {
    if (std::this_thread::get_id() != owner_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return open_; });
    }
    return !moved[region].load();
  }
  void release() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  std::array<std::atomic<bool>, 2> moved{};

 private:
  const std::thread::id owner_ = std::this_thread::get_id();
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool open_ = false;
};

class VanishedMemory : public testing::Test {
 protected:
  void SetUp() override {
    vault_ = Vault::create({"job", 0, 1}, 2, 64);
    engine_ = std::make_unique<SnapshotEngine>(EngineOptions{}, *vault_,
                                               [this](const wire::Ballot& ballot) {
                                                 votes_.push_back(ballot);
                                                 voter_->outcome(ballot);
                                               });
    voter_ = engine_.get();
    plan(/*early=*/false);
    for (size_t i = 0; i < 2; ++i) {
      map(i);
    }
  }
  void TearDown() override {
    places_->release();
    engine_.reset();
    for (void* address : addresses_) {
      ::munmap(address, kBytes);
    }
  }
  void plan(bool early) {
    std::vector<RegionInfo> regions;
    for (const std::string name : {"still", "moving"}) {
      regions.push_back(
          {name, "uint8", {kBytes}, kBytes, 1, -1, early && name == std::string("moving")});
    }
    engine_->setTable(buildTable(0, 1, std::move(regions), {}, "none", {}, kChunk));
  }
  void map(size_t region) {
    addresses_[region] =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::memset(addresses_[region], static_cast<int>(region + 1), kBytes);
  }
  CaptureResult capture(int64_t step) {
    const std::vector<const void*> addresses(addresses_.begin(), addresses_.end());
    return engine_->capture({step, addresses, places_, "small"});
  }
  void finish() {
    places_->release();
    engine_->gate();
    engine_->settle();
  }
  void expectDropped() {
    EXPECT_EQ(votes_.back().yes, 0);
    EXPECT_EQ(engine_->takeLateWritten(), std::vector<uint32_t>{1});
    EXPECT_EQ(vault_->stats().moved.load(), 1u);
    EXPECT_NE(std::string(vault_->stats().note).find("moving was moved or freed"),
              std::string::npos)
        << vault_->stats().note;
  }
  void expectSealed(int64_t step) {
    EXPECT_EQ(votes_.back().step, step);
    EXPECT_EQ(votes_.back().yes, 1);
    const VaultReader reader(vault_->fd());
    for (const SlotView& view : reader.slots()) {
      EXPECT_TRUE(reader.verify(view).empty());
    }
  }

  std::unique_ptr<Vault> vault_;
  std::unique_ptr<SnapshotEngine> engine_;
  SnapshotEngine* voter_ = nullptr;
  std::vector<wire::Ballot> votes_;
  std::array<void*, 2> addresses_{};
  std::shared_ptr<Places> places_ = std::make_shared<Places>();
};

TEST_F(VanishedMemory, UnmappedBeforeItsCopy) {
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  ::munmap(addresses_[1], kBytes);
  finish();
  expectDropped();
  map(1);
  ASSERT_EQ(capture(2), CaptureResult::kTaken);
  finish();
  expectSealed(2);
}

TEST_F(VanishedMemory, OnePageUnmappedBeforeItsCopy) {
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  ::munmap(static_cast<std::byte*>(addresses_[1]) + kBytes / 2, kPage);
  finish();
  expectDropped();
}

// The old memory is still there, with what was in it: the pointer alone tells.
TEST_F(VanishedMemory, MovedBeforeTheGate) {
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  places_->moved[1].store(true);
  finish();
  expectDropped();
}

TEST_F(VanishedMemory, MovedBetweenItsAddressAndItsSamples) {
  places_->moved[1].store(true);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  finish();
  expectDropped();
}

TEST_F(VanishedMemory, AnEarlyRegionThatIsNotThere) {
  plan(/*early=*/true);
  ::munmap(addresses_[1], kBytes);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  finish();
  expectDropped();
}

// From the next plan on it is copied before the step returns, and may then move.
TEST_F(VanishedMemory, MayMoveOnceItIsCopiedEarly) {
  plan(/*early=*/true);
  ASSERT_EQ(capture(1), CaptureResult::kTaken);
  ::munmap(addresses_[1], kBytes);
  finish();
  expectSealed(1);
  EXPECT_EQ(vault_->stats().moved.load(), 0u);
}

TEST_F(VanishedMemory, SamplesAreTakenWhileNothingMoves) {
  const std::vector<const void*> addresses(addresses_.begin(), addresses_.end());
  int calls = 0;
  CaptureInput input{.step = 1, .addresses = addresses, .versions = places_, .objects = "small"};
  input.still = [&](const std::function<void()>& work) {
    ++calls;
    work();
  };
  ASSERT_EQ(engine_->capture(input), CaptureResult::kTaken);
  EXPECT_EQ(calls, 1);
  finish();
  expectSealed(1);
}

}  // namespace vanished_memory_test
}  // namespace reft
