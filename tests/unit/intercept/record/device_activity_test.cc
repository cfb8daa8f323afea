#include "intercept/record/device_activity.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

namespace reft::device_activity_test {

constexpr int64_t kSecond = 1'000'000'000;

pid_t self() {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

pid_t endedThread() {
  pid_t thread = 0;
  std::thread([&] { thread = self(); }).join();
  return thread;
}

std::unique_ptr<ActivityTable> armedTable() {
  auto table = std::make_unique<ActivityTable>();
  table->layout = ActivityTable::kLayout;
  table->state = ActivityTable::kArmed;
  return table;
}

TEST(DeviceActivity, IsAbsentWithoutTheLibrary) {
  EXPECT_EQ(readDeviceActivity().state, DeviceActivity::kAbsent);
  EXPECT_EQ(readDeviceActivity(nullptr).count(CallKind::kLaunch), 0u);
}

TEST(DeviceActivity, DoesNotReadATableOfAnotherVersion) {
  const auto table = armedTable();
  table->untracked[0] = 5;
  table->layout = ActivityTable::kLayout + 1;
  EXPECT_EQ(readDeviceActivity(table.get()).state, DeviceActivity::kForeign);
  EXPECT_EQ(readDeviceActivity(table.get()).untracked, 0u);
}

TEST(DeviceActivity, AddsUpWhatThreadsHaveDone) {
  const auto table = armedTable();
  table->slots[0].owner = self();
  table->slots[7].owner = endedThread();
  beginCall(table->slots[0], DriverCall::cuLaunchKernel, CallKind::kLaunch, 11, kSecond, 4);
  endCall(table->slots[0]);
  beginCall(table->slots[7], DriverCall::cuLaunchKernelEx, CallKind::kLaunch, 22, 3 * kSecond, 5);
  endCall(table->slots[7]);
  beginCall(table->slots[0], DriverCall::cuEventRecord, CallKind::kEventRecord, 1, 4 * kSecond, 5);
  endCall(table->slots[0]);
  table->untracked[static_cast<size_t>(CallKind::kLaunch)] = 100;
  const DeviceActivity activity = readDeviceActivity(table.get());
  EXPECT_EQ(activity.state, DeviceActivity::kArmed);
  EXPECT_EQ(activity.count(CallKind::kLaunch), 102u);
  EXPECT_EQ(activity.count(CallKind::kEventRecord), 1u);
  EXPECT_EQ(activity.untracked, 100u);
  ASSERT_TRUE(activity.launch);
  EXPECT_EQ(activity.launch->kernel, 22u);
  EXPECT_EQ(activity.launch->at_ns, 3 * kSecond);
  EXPECT_EQ(activity.launch->unloads, 5u);
  EXPECT_TRUE(activity.in_call.empty());
}

TEST(DeviceActivity, ListsThreadsInCallsTheOldestFirst) {
  const auto table = armedTable();
  std::atomic<pid_t> other{0};
  std::atomic<bool> end{false};
  std::thread living([&] {
    other = self();
    end.wait(false);
  });
  while (other == 0) {
    std::this_thread::yield();
  }
  table->slots[0].owner = self();
  table->slots[1].owner = other.load();
  beginCall(table->slots[0], DriverCall::cuEventSynchronize, CallKind::kEventSync, 8, 9, 0);
  beginCall(table->slots[1], DriverCall::cuStreamSynchronize, CallKind::kStreamSync, 7, 5, 0);
  const auto calls = readDeviceActivity(table.get()).in_call;
  const auto again = readDeviceActivity(table.get()).in_call;
  endCall(table->slots[0]);
  beginCall(table->slots[0], DriverCall::cuEventSynchronize, CallKind::kEventSync, 8, 9, 0);
  const auto later = readDeviceActivity(table.get()).in_call;
  end = true;
  end.notify_all();
  living.join();
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].thread, other.load());
  EXPECT_STREQ(nameOf(calls[0].call), "cuStreamSynchronize");
  EXPECT_EQ(calls[0].object, 7u);
  EXPECT_EQ(calls[0].since_ns, 5);
  EXPECT_EQ(calls[1].thread, self());
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[1].number, calls[1].number);
  ASSERT_EQ(later.size(), 2u);
  EXPECT_NE(later[1].number, calls[1].number);
}

TEST(DeviceActivity, IgnoresAThreadThatEndedInsideACall) {
  const auto table = armedTable();
  table->slots[3].owner = endedThread();
  beginCall(table->slots[3], DriverCall::cuCtxSynchronize, CallKind::kContextSync, 0, 5, 0);
  EXPECT_TRUE(readDeviceActivity(table.get()).in_call.empty());
}

// A slot whose fields belong to two calls would show: each call's time is its object.
TEST(DeviceActivity, NeverMixesTwoCalls) {
  const auto table = armedTable();
  table->slots[0].owner = self();
  std::atomic<bool> end{false};
  std::thread reader([&] {
    while (!end) {
      const DeviceActivity activity = readDeviceActivity(table.get());
      if (activity.launch) {
        ASSERT_EQ(activity.launch->kernel, static_cast<uint64_t>(activity.launch->at_ns));
      }
      for (const auto& call : activity.in_call) {
        ASSERT_EQ(call.object, static_cast<uint64_t>(call.since_ns));
      }
    }
  });
  for (int64_t i = 1; i < 200'000; ++i) {
    beginCall(table->slots[0], DriverCall::cuLaunchKernel, CallKind::kLaunch,
              static_cast<uint64_t>(i), i, 0);
    endCall(table->slots[0]);
  }
  end = true;
  reader.join();
}

TEST(DeviceActivity, NamesEveryCallAndKind) {
  for (size_t call = 1; call < kDriverCalls; ++call) {
    EXPECT_EQ(std::string(nameOf(static_cast<DriverCall>(call))).substr(0, 2), "cu");
  }
  EXPECT_STREQ(nameOf(DriverCall::none), "");
  EXPECT_STREQ(nameOf(static_cast<DriverCall>(9999)), "");
  for (size_t kind = 0; kind < kCallKinds; ++kind) {
    EXPECT_STRNE(wordOf(static_cast<CallKind>(kind)), "");
  }
}

}  // namespace reft::device_activity_test
