#include "intercept/record/op_events.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

namespace reft {
namespace op_events_test {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

OpEvent event(OpEvent::What what, uint64_t ticket = 0) {
  OpEvent result;
  result.what = what;
  result.ticket = ticket;
  return result;
}

TEST(OpEvents, ArePolledInTheirOrder) {
  OpEvents events;
  OpEvent seen;
  EXPECT_FALSE(events.poll(seen));
  for (uint64_t round = 0; round < 3 * OpEvents::kCapacity; round += 100) {
    for (uint64_t i = 0; i < 100; ++i) {
      events.push(event(OpEvent::kDone, round + i));
    }
    for (uint64_t i = 0; i < 100; ++i) {
      ASSERT_TRUE(events.poll(seen));
      EXPECT_EQ(seen.ticket, round + i);
    }
    EXPECT_FALSE(events.poll(seen));
  }
  EXPECT_EQ(events.lost(), 0u);
}

TEST(OpEvents, AFullRingKeepsWhatItHasAndCountsTheRest) {
  OpEvents events;
  for (uint64_t i = 0; i < OpEvents::kCapacity + 7; ++i) {
    events.push(event(OpEvent::kBegin, i));
  }
  EXPECT_EQ(events.lost(), 7u);
  OpEvent seen;
  for (uint64_t i = 0; i < OpEvents::kCapacity; ++i) {
    ASSERT_TRUE(events.poll(seen));
    EXPECT_EQ(seen.ticket, i);
  }
  EXPECT_FALSE(events.poll(seen));
  events.push(event(OpEvent::kBegin, 1));
  EXPECT_TRUE(events.poll(seen));
}

TEST(OpEvents, OfManyThreadsAreAllHeardOrCountedAndKeepTheirOrder) {
  constexpr uint64_t kThreads = 4;
  constexpr uint64_t kEach = 50'000;
  OpEvents events;
  std::atomic<uint64_t> running{kThreads};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 1; i <= kEach; ++i) {
        OpEvent sent = event(OpEvent::kBegin, i);
        sent.group = static_cast<uint32_t>(t);
        sent.bytes = i * 31 + t;
        events.push(sent);
      }
      --running;
      events.wake();
    });
  }
  std::array<uint64_t, kThreads> newest{};
  uint64_t heard = 0;
  const auto hear = [&] {
    OpEvent seen;
    while (events.poll(seen)) {
      ASSERT_LT(seen.group, kThreads);
      ASSERT_GT(seen.ticket, newest[seen.group]);
      ASSERT_EQ(seen.bytes, seen.ticket * 31 + seen.group);
      newest[seen.group] = seen.ticket;
      ++heard;
    }
  };
  while (running > 0) {
    hear();
    events.sleep(OpEvents::bit(OpEvent::kBegin), kNever, SteadyClock::instance(),
                 [&] { return running == 0; });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  hear();
  EXPECT_EQ(heard + events.lost(), kThreads * kEach);
  EXPECT_GT(heard, 0u);
}

// The listener sleeps without a limit before each answer: one wake that is missed, and this never
// ends.
TEST(OpEvents, NoWakeIsMissed) {
  OpEvents there;
  OpEvents back;
  constexpr uint64_t kRounds = 20'000;
  const auto expect = [](OpEvents& events, uint64_t ticket) {
    OpEvent seen;
    while (!events.poll(seen)) {
      events.sleep(OpEvents::bit(OpEvent::kWaitBegin), kNever, SteadyClock::instance(),
                   [] { return false; });
    }
    EXPECT_EQ(seen.ticket, ticket);
  };
  std::thread other([&] {
    for (uint64_t i = 0; i < kRounds; ++i) {
      expect(there, i);
      back.push(event(OpEvent::kWaitBegin, i));
    }
  });
  for (uint64_t i = 0; i < kRounds; ++i) {
    there.push(event(OpEvent::kWaitBegin, i));
    expect(back, i);
  }
  other.join();
}

TEST(OpEvents, EventsThatNobodyWaitsForAreLeftUntilTheRingIsHalfFull) {
  OpEvents events;
  std::atomic<bool> asleep{false};
  std::thread producer([&] {
    while (!asleep) {
      std::this_thread::yield();
    }
    // Past the half: the one that wakes comes at a round number.
    for (uint64_t i = 0; i < OpEvents::kCapacity / 2 + 100; ++i) {
      events.push(event(OpEvent::kDone, i));
    }
  });
  events.sleep(0, kNever, SteadyClock::instance(), [&] {
    asleep = true;
    return false;
  });
  producer.join();
  OpEvent seen;
  uint64_t heard = 0;
  while (events.poll(seen)) {
    ++heard;
  }
  EXPECT_EQ(heard, OpEvents::kCapacity / 2 + 100);
}

TEST(OpEvents, SleepEndsWithItsTimeAndWithWhatIsReady) {
  OpEvents events;
  ManualClock clock;
  events.sleep(~0u, clock.nowNs(), clock, [] { return false; });
  events.sleep(~0u, kNever, clock, [] { return true; });
  events.push(event(OpEvent::kDone));
  events.sleep(OpEvents::bit(OpEvent::kWaitBegin), kNever, clock,
               [] { return false; });  // there is something to hear
}

TEST(OpEvents, TheOpLogTellsItsMarks) {
  ManualClock clock;
  OpEvents events;
  OpLog log(nullptr, 2, clock);
  OpLog::Op op;
  op.kind = OpKind::kRecv;
  op.group = 3;
  op.peer = 5;
  op.tag = 7;
  op.bytes = 11;
  op.signature = 13;
  log.begin(op);  // nobody listens yet
  log.tell(&events);
  const uint64_t ticket = log.begin(op);
  clock.advance(std::chrono::nanoseconds(10));
  log.markEnqueued(ticket);
  log.markWaitBegin(ticket);
  clock.advance(std::chrono::nanoseconds(10));
  // Its record is overwritten; the wait goes on.
  log.tell(nullptr);
  log.begin(op);
  log.begin(op);
  log.tell(&events);
  log.markWaitEnd(ticket);
  log.markDone(ticket);
  const std::array<OpEvent::What, 4> kinds{OpEvent::kBegin, OpEvent::kWaitBegin, OpEvent::kWaitEnd,
                                           OpEvent::kDone};
  const std::array<int64_t, 4> times{1, 11, 21, 21};
  OpEvent seen;
  for (size_t i = 0; i < kinds.size(); ++i) {
    ASSERT_TRUE(events.poll(seen)) << i;
    EXPECT_EQ(seen.what, kinds[i]);
    EXPECT_EQ(seen.ticket, ticket);
    EXPECT_EQ(seen.at_ns, times[i]);
    if (i == 0) {
      EXPECT_EQ(seen.kind, OpKind::kRecv);
      EXPECT_EQ(seen.group, 3u);
      EXPECT_EQ(seen.peer, 5);
      EXPECT_EQ(seen.tag, 7u);
      EXPECT_EQ(seen.bytes, 11u);
      EXPECT_EQ(seen.signature, 13u);
    }
  }
  EXPECT_FALSE(events.poll(seen));
}

}  // namespace op_events_test
}  // namespace reft
