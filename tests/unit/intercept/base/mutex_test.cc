#include "intercept/base/mutex.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

namespace reft {
namespace mutex_test {

using namespace std::chrono_literals;

struct Box {
  Mutex mutex;
  ConditionVariable changed;
  int value GUARDED_BY(mutex) = 0;
};

TEST(Mutex, IsHeldUntilTheLockEnds) {
  Box box;
  {
    MutexLock lock(box.mutex);
    box.value = 1;
    std::thread([&] { EXPECT_FALSE(box.mutex.try_lock()); }).join();
  }
  if (!box.mutex.try_lock()) {
    FAIL() << "still held";
  }
  EXPECT_EQ(box.value, 1);
  box.mutex.unlock();
}

TEST(Mutex, IsFreeWhileTheLockIsGivenUp) {
  Box box;
  MutexLock lock(box.mutex);
  lock.unlock();
  std::thread([&] {
    MutexLock other(box.mutex);
    box.value = 2;
  }).join();
  lock.lock();
  EXPECT_EQ(box.value, 2);
  std::thread([&] { EXPECT_FALSE(box.mutex.try_lock()); }).join();
}

TEST(ConditionVariable, WaitReturnsWithTheMutexHeld) {
  Box box;
  std::thread setter;
  {
    MutexLock lock(box.mutex);
    setter = std::thread([&] {
      MutexLock other(box.mutex);
      box.value = 3;
      box.changed.notify_one();
    });
    box.changed.wait(box.mutex, [&]() REQUIRES(box.mutex) { return box.value == 3; });
    std::thread([&] { EXPECT_FALSE(box.mutex.try_lock()); }).join();
  }
  setter.join();
  MutexLock lock(box.mutex);
  EXPECT_EQ(box.value, 3);
}

TEST(ConditionVariable, BoundedWaitsReportWhatThePredicateSays) {
  Box box;
  MutexLock lock(box.mutex);
  auto never = [] { return false; };
  auto always = [] { return true; };
  EXPECT_FALSE(box.changed.wait_for(box.mutex, 1ms, never));
  EXPECT_TRUE(box.changed.wait_for(box.mutex, 1h, always));
  const auto now = std::chrono::steady_clock::now();
  EXPECT_FALSE(box.changed.wait_until(box.mutex, now, never));
  EXPECT_TRUE(box.changed.wait_until(box.mutex, now, always));
  EXPECT_EQ(box.changed.wait_until(box.mutex, now), std::cv_status::timeout);
}

}  // namespace mutex_test
}  // namespace reft
