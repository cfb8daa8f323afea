#include "snapshot/engine/copy_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "snapshot/engine/telemetry.h"

namespace reft {
namespace copy_threads_test {

// A system that starts so many threads, and then has no room for the next.
int room = 0;
bool out_of_memory = false;
std::atomic<int> ended{0};

std::thread startInRoom(std::function<void()> body) {
  if (room-- <= 0) {
    if (out_of_memory) {
      throw std::bad_alloc();
    }
    throw std::system_error(EAGAIN, std::generic_category());
  }
  return std::thread([body = std::move(body)] {
    body();
    ++ended;
  });
}

class CopyThreadsTest : public testing::Test {
 protected:
  CopyThreadsTest() {
    out_of_memory = false;
    ended = 0;
  }
  // The first thread is never idle: `always` runs again and again.
  std::unique_ptr<CopyThreads> start(
      uint32_t count, std::function<void()> always = [] {}) {
    return std::make_unique<CopyThreads>(count, context_,
                                         CopyThreads::Chores{.finish = [](SnapshotJob&) {},
                                                             .idle = [] { return int64_t{0}; },
                                                             .always = std::move(always)},
                                         startInRoom);
  }

  std::unique_ptr<Vault> vault_ = Vault::create({"job", 0, 1}, 2, 64);
  Telemetry telemetry_{*vault_, 9};
  OpEvents events_;
  OpListener listener_{events_};
  CopyContext context_{.vault = *vault_,
                       .telemetry = telemetry_,
                       .clock = SteadyClock::instance(),
                       .events = events_,
                       .listener = listener_,
                       .all_copied = [](SnapshotJob&) {},
                       .call_helpers = [] {},
                       .expect_replays = [] {}};
};

TEST_F(CopyThreadsTest, GoOnWithThoseThatStarted) {
  room = 2;
  std::promise<void> works;
  std::once_flag once;
  auto threads = start(4, [&] { std::call_once(once, [&] { works.set_value(); }); });
  works.get_future().wait();
  threads->callHelpers();
  EXPECT_EQ(vault_->stats().errors.load(), 1u);
  EXPECT_EQ(std::string(vault_->stats().note).find("started 2 of 4 copy threads: "), 0u)
      << vault_->stats().note;
  threads.reset();
  EXPECT_EQ(ended.load(), 2);
}

TEST_F(CopyThreadsTest, GrowOnce) {
  room = 3;
  auto threads = start(1);
  threads->grow(1);
  EXPECT_EQ(room, 2);
  threads->grow(4);
  threads->grow(4);  // the failure is counted once
  threads->grow(2);
  threads->callHelpers();
  EXPECT_EQ(std::string(vault_->stats().note).find("started 3 of 4 copy threads: "), 0u)
      << vault_->stats().note;
  EXPECT_EQ(vault_->stats().errors.load(), 1u);
  threads.reset();
  EXPECT_EQ(ended.load(), 3);
}

TEST_F(CopyThreadsTest, CannotBeMadeWithoutTheFirst) {
  room = 0;
  EXPECT_THROW(start(4), std::system_error);
}

TEST_F(CopyThreadsTest, AnotherErrorEndsThoseThatStarted) {
  room = 2;
  out_of_memory = true;
  EXPECT_THROW(start(4), std::bad_alloc);
  EXPECT_EQ(ended.load(), 2);
}

}  // namespace copy_threads_test
}  // namespace reft
