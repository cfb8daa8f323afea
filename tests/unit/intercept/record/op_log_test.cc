#include "intercept/record/op_log.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft {
namespace op_log_test {

class Area {
 public:
  explicit Area(uint32_t capacity)
      : bytes(OpLog::areaBytes(capacity)),
        data(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~Area() { ::munmap(data, bytes); }
  const size_t bytes;
  void* const data;
};

OpLog::Op op(OpKind kind, uint32_t seq, uint64_t bytes = 0) {
  OpLog::Op result;
  result.kind = kind;
  result.seq = seq;
  result.bytes = bytes;
  return result;
}

TEST(OpLog, AReaderSeesHowFarAnOpCame) {
  Area area(16);
  ManualClock clock;
  OpLog log(area.data, 16, clock);
  const uint32_t group = log.addGroup("world", 3, 8);
  OpLog::Op written = op(OpKind::kAllreduce, 1, 4096);
  written.group = group;
  written.peer = 2;
  written.signature = 77;
  const uint64_t ticket = log.begin(written);
  const OpLogReader reader(area.data, area.bytes);
  OpEntry entry = reader.tail(10).at(0);
  EXPECT_EQ(entry.ticket, ticket);
  EXPECT_EQ(entry.kind, OpKind::kAllreduce);
  EXPECT_EQ(entry.bytes, 4096u);
  EXPECT_EQ(entry.signature, 77u);
  EXPECT_EQ(entry.peer, 2);
  EXPECT_EQ(entry.enqueued_ns, 0u);
  clock.advance(std::chrono::nanoseconds(10));
  log.markEnqueued(ticket);
  clock.advance(std::chrono::nanoseconds(10));
  log.markWaitBegin(ticket);
  clock.advance(std::chrono::nanoseconds(10));
  log.markWaitEnd(ticket);
  clock.advance(std::chrono::nanoseconds(10));
  log.markDone(ticket, true);
  entry = reader.tail(10).at(0);
  EXPECT_EQ(entry.begin_ns, 1u);
  EXPECT_EQ(entry.enqueued_ns, 11u);
  EXPECT_EQ(entry.wait_begin_ns, 21u);
  EXPECT_EQ(entry.wait_end_ns, 31u);
  EXPECT_EQ(entry.done_ns, 41u);
  EXPECT_TRUE(entry.failed);
  EXPECT_EQ(reader.heartbeatNs(), 41u);
  EXPECT_EQ(reader.writerPid(), static_cast<uint32_t>(::getpid()));
  const auto groups = reader.groups();
  ASSERT_GT(groups.size(), group);
  EXPECT_STREQ(groups[group].name, "world");
  EXPECT_EQ(groups[group].rank, 3);
  EXPECT_EQ(groups[group].size, 8);
}

TEST(OpLog, KnowsTheThreadThatBeganAnOp) {
  Area area(16);
  OpLog log(area.data, 16);
  pid_t tid = 0;
  pthread_t handle{};
  log.begin(op(OpKind::kAllreduce, 1));
  std::thread([&] {
    tid = ::gettid();
    handle = ::pthread_self();
    log.begin(op(OpKind::kAllreduce, 2));
    log.begin(op(OpKind::kAllreduce, 3));
  }).join();
  const auto ops = OpLogReader(area.data, area.bytes).tail(3);
  EXPECT_EQ(OpThread::handleOf(ops[0].thread), static_cast<uint64_t>(::pthread_self()));
  EXPECT_EQ(OpThread::tidBitsOf(ops[0].thread), static_cast<uint16_t>(::gettid()));
  EXPECT_EQ(OpThread::handleOf(ops[1].thread), static_cast<uint64_t>(handle));
  EXPECT_EQ(OpThread::tidBitsOf(ops[1].thread), static_cast<uint16_t>(tid));
  EXPECT_EQ(ops[1].thread, ops[2].thread);
  EXPECT_EQ(OpThread::of(uint64_t{1} << 60, 7), 0u);  // no room for it: unknown
}

TEST(OpLog, KeepsTheNewestRecordsInOrder) {
  Area area(8);
  OpLog log(area.data, 8);
  for (uint32_t i = 1; i <= 20; ++i) {
    log.begin(op(OpKind::kBarrier, i));
  }
  const OpLogReader reader(area.data, area.bytes);
  EXPECT_EQ(reader.opsBegun(), 20u);
  const auto entries = reader.tail(100);
  ASSERT_EQ(entries.size(), 8u);
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(entries[i].seq, 13 + i);
  }
  ASSERT_EQ(reader.tail(3).size(), 3u);
  EXPECT_EQ(reader.tail(3).front().seq, 18u);
}

TEST(OpLog, AMarkOfAnOverwrittenOpTouchesNothing) {
  Area area(4);
  OpLog log(area.data, 4);
  const uint64_t old = log.begin(op(OpKind::kBarrier, 1));
  for (uint32_t i = 2; i <= 5; ++i) {
    log.begin(op(OpKind::kBarrier, i));
  }
  log.markDone(old, true);
  for (const OpEntry& entry : OpLogReader(area.data, area.bytes).tail(4)) {
    EXPECT_EQ(entry.done_ns, 0u);
    EXPECT_FALSE(entry.failed);
  }
}

TEST(OpLog, TicketsOutliveAMoveIntoTheVault) {
  Area area(64);
  OpLog log(nullptr, 16);
  log.addGroup("world", 0, 2);
  const uint64_t ticket = log.begin(op(OpKind::kSend, 5));
  log.moveTo(area.data, 64);
  log.markDone(ticket);
  const OpLogReader reader(area.data, area.bytes);
  const auto entries = reader.tail(10);
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].seq, 5u);
  EXPECT_NE(entries[0].done_ns, 0u);
  EXPECT_STREQ(reader.groups().at(0).name, "world");
}

TEST(OpLog, LongGroupNamesAreCutAndTooManyShareTheLast) {
  Area area(4);
  OpLog log(area.data, 4);
  const uint32_t first = log.addGroup(std::string(500, 'n'), 0, 1);
  EXPECT_EQ(OpLogReader(area.data, area.bytes).groups().at(first).name,
            std::string(OpGroup::kNameBytes - 1, 'n'));
  uint32_t last = 0;
  for (uint32_t i = 0; i < OpLogHeader::kMaxGroups + 10; ++i) {
    last = log.addGroup("group " + std::to_string(i), 0, 1);
  }
  EXPECT_EQ(last, OpLogHeader::kMaxGroups - 1);
  EXPECT_EQ(OpLogReader(area.data, area.bytes).groups().size(), OpLogHeader::kMaxGroups);
}

TEST(OpLog, CallSitesHaveTheirTextAndMoveAlong) {
  Area area(16), vault(16);
  OpLog log(area.data, 16);
  log.nameCallSite(7, "train.py:88 load_batch");
  const std::string end = "train.py:3 main";
  log.nameCallSite(8, std::string(500, 'x') + end);
  log.moveTo(vault.data, 16);
  log.nameCallSite(9, "");
  log.nameCallSite(
      10, std::string(60, 'a') + std::string(1, '\xe6') + "\x9c\xac" + std::string(121, 'b'));
  auto sites = OpLogReader(vault.data, vault.bytes).callSites();
  EXPECT_EQ(sites.size(), 4u);
  EXPECT_EQ(sites.at(10), std::string(121, 'b')) << "no half of a character";
  EXPECT_EQ(sites.at(7), "train.py:88 load_batch");
  EXPECT_EQ(sites.at(8), std::string(OpCallSite::kTextBytes - 1 - end.size(), 'x') + end)
      << "of a long one the end";
  EXPECT_EQ(sites.at(9), "");
  for (uint32_t id = 11; id < 3000; ++id) {
    log.nameCallSite(id, "somewhere");
  }
  sites = OpLogReader(vault.data, vault.bytes).callSites();
  EXPECT_EQ(sites.size(), OpLogHeader::kMaxCallSites) << "the others have no text";
  EXPECT_EQ(sites.at(7), "train.py:88 load_batch");
}

TEST(OpLog, ThreadsClaimDifferentRecords) {
  constexpr uint32_t kThreads = 4, kOps = 500;
  Area area(4096);
  OpLog log(area.data, 4096);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&log, t] {
      for (uint32_t i = 0; i < kOps; ++i) {
        log.markDone(log.begin(op(OpKind::kAllreduce, t * kOps + i)));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::set<uint32_t> seen;
  for (const OpEntry& entry : OpLogReader(area.data, area.bytes).tail(4096)) {
    EXPECT_NE(entry.done_ns, 0u);
    seen.insert(entry.seq);
  }
  EXPECT_EQ(seen.size(), kThreads * kOps);
}

TEST(OpLog, SurvivesSigkillOfItsWriterAndNeverShowsAMixedRecord) {
  Area area(64);
  const pid_t child = ::fork();
  if (child == 0) {
    OpLog log(area.data, 64);
    for (uint32_t i = 1;; ++i) {
      OpLog::Op o = op(OpKind::kAllreduce, i, i);
      o.signature = i;
      o.tag = i;
      log.begin(o);
    }
  }
  // Reads while the writer runs at full speed and after its death; a half-written record must be
  // left out.
  uint64_t read = 0;
  const auto check = [&] {
    for (const OpEntry& entry : OpLogReader(area.data, area.bytes).tail(64)) {
      ASSERT_EQ(entry.bytes, entry.seq);
      ASSERT_EQ(entry.signature, entry.seq);
      ASSERT_EQ(entry.tag, entry.seq);
      ++read;
    }
  };
  while (static_cast<volatile OpLogHeader*>(area.data)->magic != OpLogHeader::kMagic) {
    ::usleep(100);
  }
  const OpLogReader reader(area.data, area.bytes);
  for (int i = 0; i < 300 || reader.opsBegun() < 1000; ++i) {
    check();
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  read = 0;
  check();
  EXPECT_GE(read, 62u);  // all but what was being written
}

TEST(OpLog, ReaderRefusesWhatIsNoOpLog) {
  Area area(16);
  OpLog log(area.data, 16);
  EXPECT_THROW(OpLogReader(area.data, 10), Corruption);
  EXPECT_THROW(OpLogReader(area.data, area.bytes - 1), Corruption);
  auto* header = static_cast<OpLogHeader*>(area.data);
  const auto broken = [&](auto OpLogHeader::*member, auto value) {
    const auto before = header->*member;
    header->*member = value;
    EXPECT_THROW(OpLogReader(area.data, area.bytes), Corruption);
    header->*member = before;
  };
  broken(&OpLogHeader::magic, uint64_t{0});
  broken(&OpLogHeader::version, 9u);
  broken(&OpLogHeader::capacity, 0u);
  broken(&OpLogHeader::capacity, 15u);
  broken(&OpLogHeader::capacity, 1u << 31);
  EXPECT_NO_THROW(OpLogReader(area.data, area.bytes));
}

TEST(OpLog, ReaderSurvivesRandomBytes) {
  Area area(16);
  std::mt19937 random(2);
  OpLog log(area.data, 16);
  log.addGroup("g", 0, 1);
  log.begin(op(OpKind::kBarrier, 1));
  const std::string good(static_cast<char*>(area.data), area.bytes);
  for (int round = 0; round < 300; ++round) {
    std::memcpy(area.data, good.data(), good.size());
    for (int flips = 0; flips < 20; ++flips) {
      static_cast<uint8_t*>(area.data)[random() % (round % 2 == 0 ? 64 : area.bytes)] =
          static_cast<uint8_t>(random());
    }
    try {
      const OpLogReader reader(area.data, area.bytes);
      EXPECT_LE(reader.groups().size(), OpLogHeader::kMaxGroups);
      EXPECT_LE(reader.tail(1000).size(), 16u);
    } catch (const Corruption&) {
    }
  }
}

TEST(OpLog, KindsHaveNames) {
  EXPECT_STREQ(opKindName(OpKind::kAllreduce), "all_reduce");
  EXPECT_STREQ(opKindName(static_cast<OpKind>(200)), "unknown");
}

}  // namespace op_log_test
}  // namespace reft
