// Which threads of a rank call its ops, and which of them still live.

#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include "hang_detect/evidence/evidence.h"

namespace reft {
namespace callers_test {

OpEntry calledBy(uint64_t thread, OpKind kind = OpKind::kAllreduce) {
  OpEntry op;
  op.thread = thread;
  op.kind = kind;
  return op;
}

std::vector<uint64_t> threadsOf(const std::vector<OpEntry>& ops) {
  std::vector<uint64_t> threads;
  for (const CallingThread& caller : callersOf(ops)) {
    threads.push_back(caller.thread);
  }
  return threads;
}

TEST(Callers, WhoTookTheNewestStepIsFirst) {
  const auto step = [](uint64_t thread) { return calledBy(thread, OpKind::kStep); };
  EXPECT_EQ(threadsOf({step(1), step(2), calledBy(3), calledBy(3), calledBy(1)}),
            (std::vector<uint64_t>{2, 1, 3}));
}

TEST(Callers, WithoutStepsTheNumberOfOpsDecidesThenTheNewest) {
  EXPECT_EQ(threadsOf({calledBy(1), calledBy(2), calledBy(2), calledBy(3)}),
            (std::vector<uint64_t>{2, 3, 1}));
  EXPECT_TRUE(threadsOf({calledBy(0), calledBy(0)}).empty());
  EXPECT_TRUE(threadsOf({}).empty());
}

TEST(Callers, HaveTheirStatesWhileTheyLive) {
  std::atomic<bool> end{false};
  std::atomic<uint64_t> sleeper{0};
  std::thread thread([&] {
    sleeper = OpThread::current();
    end.wait(false);
  });
  while (sleeper == 0) {
    std::this_thread::yield();
  }
  uint64_t ended = 0;
  std::thread([&] { ended = OpThread::current(); }).join();
  RankEvidence rank;
  rank.pid = ::getpid();
  rank.callers = {{ended}, {sleeper.load()}, {OpThread::current()}};
  addProcessState(rank);
  end = true;
  end.notify_all();
  thread.join();
  ASSERT_EQ(rank.callers.size(), 2u);
  EXPECT_EQ(rank.callers[0].thread, sleeper.load());
  EXPECT_FALSE(rank.callers[0].state.empty());
  EXPECT_EQ(rank.callers[1].thread, OpThread::current());
  EXPECT_EQ(rank.callers[1].state, "R");
}

TEST(Callers, OfADeadRankAreUnknown) {
  RankEvidence rank;
  rank.pid = 0x7FFFFFFF;  // above any number of a process
  rank.callers = {{OpThread::current()}};
  addProcessState(rank);
  EXPECT_TRUE(rank.callers.empty());
}

}  // namespace callers_test
}  // namespace reft
