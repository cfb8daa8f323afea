#include "snapshot/engine/snapshot_job.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "intercept/base/error.h"
#include "snapshot/engine/copier.h"

namespace reft {
namespace snapshot_job_test {

using namespace std::chrono_literals;
using State = SnapshotJob::State;

std::shared_ptr<SnapshotJob> makeJob() {
  static std::vector<std::byte> memory(10'000);
  static const std::array<const void*, 1> addresses = {memory.data()};
  const auto plan = std::make_shared<const SnapshotPlan>(
      buildTable(0, 1, {{"r", "uint8", {10'000}, 10'000, 1, -1, false}}, {}, "none", {}, 4096));
  CaptureInput input;
  input.step = 3;
  input.addresses = addresses;
  return std::make_shared<SnapshotJob>(SnapshotJob::Place{plan, 1, 2}, input, false);
}

TEST(SnapshotJobTest, AllowsExactlyTheTransitionsOfItsDrawing) {
  const std::set<std::pair<State, State>> drawn = {
      {State::kCopying, State::kCompared}, {State::kCopying, State::kCopied},
      {State::kCompared, State::kChecked}, {State::kCopied, State::kChecked},
      {State::kChecked, State::kSealing},  {State::kSealing, State::kSealed},
      {State::kSealing, State::kDropped}};
  for (size_t from = 0; from < SnapshotJob::kStates; ++from) {
    for (size_t to = 0; to < SnapshotJob::kStates; ++to) {
      const std::pair pair(static_cast<State>(from), static_cast<State>(to));
      EXPECT_EQ(SnapshotJob::allowed(pair.first, pair.second), drawn.count(pair) == 1)
          << SnapshotJob::name(pair.first) << " to " << SnapshotJob::name(pair.second);
    }
  }
}

TEST(SnapshotJobTest, CopiedThenChecked) {
  const auto job = makeJob();
  EXPECT_FALSE(job->check()) << "chunks are missing";
  EXPECT_FALSE(job->claim());
  EXPECT_FALSE(job->allCopied(/*between_ops=*/false));
  EXPECT_EQ(job->state(), State::kCopied);
  EXPECT_FALSE(job->claim()) << "the counters are not compared";
  EXPECT_FALSE(job->checked());
  EXPECT_TRUE(job->check());
  EXPECT_TRUE(job->checked());
  EXPECT_FALSE(job->check()) << "once";
  EXPECT_TRUE(job->claim());
  EXPECT_FALSE(job->claim()) << "by one caller";
  job->finish(true);
  EXPECT_EQ(job->state(), State::kSealed);
}

TEST(SnapshotJobTest, ComparedThenCopied) {
  const auto job = makeJob();
  EXPECT_FALSE(job->compare());
  EXPECT_EQ(job->state(), State::kCompared);
  EXPECT_FALSE(job->compare()) << "once";
  EXPECT_FALSE(job->checked());
  EXPECT_TRUE(job->allCopied(/*between_ops=*/false));
  EXPECT_TRUE(job->claim());
  job->finish(false);
  EXPECT_EQ(job->state(), State::kDropped);
}

TEST(SnapshotJobTest, CopiedBetweenTwoOpsIsChecked) {
  const auto job = makeJob();
  EXPECT_TRUE(job->allCopied(/*between_ops=*/true));
  EXPECT_EQ(job->state(), State::kChecked);
  EXPECT_FALSE(job->compare());
}

TEST(SnapshotJobTest, RefusesWhatItsTableLacks) {
  const auto job = makeJob();
  EXPECT_THROW(job->finish(true), InvalidArgument);
  job->allCopied(true);
  EXPECT_THROW(job->allCopied(true), InvalidArgument);
  EXPECT_EQ(job->state(), State::kChecked);
}

TEST(SnapshotJobTest, OneOfManyThreadsClaimsIt) {
  for (int round = 0; round < 50; ++round) {
    const auto job = makeJob();
    std::atomic<int> claims{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        job->awaitCopied();
        job->check();
        if (job->claim()) {
          ++claims;
          job->finish(true);
        }
        job->awaitFinished();
      });
    }
    job->allCopied(round % 2 == 0);
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(claims.load(), 1);
  }
}

TEST(SnapshotJobTest, WaitingForItsEndHasALimit) {
  const auto job = makeJob();
  EXPECT_FALSE(job->awaitFinished(1ms));
  job->allCopied(true);
  job->claim();
  job->finish(false);
  EXPECT_TRUE(job->awaitFinished(0ms));
}

}  // namespace snapshot_job_test
}  // namespace reft
