#include "hang_detect/report/report.h"
#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/verdict/verdict.h"

#include <csignal>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

namespace reft {
namespace report_test {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kNow = 100'000'000'000;

OpGroup group(const std::string& name, int rank, int size) {
  OpGroup result{};
  std::strncpy(result.name, name.c_str(), OpGroup::kNameBytes - 1);
  result.rank = rank;
  result.size = size;
  return result;
}

OpEntry op(OpKind kind, uint32_t seq, bool done, int32_t peer = -1, uint32_t group = 0) {
  OpEntry result;
  result.ticket = seq;
  result.kind = kind;
  result.seq = seq;
  result.peer = peer;
  result.group = group;
  result.bytes = 4u << 20;
  result.signature = 7;
  result.begin_ns = kNow - 31'000'000'000;
  result.enqueued_ns = result.begin_ns + 1000;
  result.wait_begin_ns = result.begin_ns + 2000;
  if (done) {
    result.wait_end_ns = result.done_ns = result.begin_ns + 5'000'000;
  }
  return result;
}

RankEvidence rankOf(int rank, int world, std::vector<OpEntry> tail) {
  RankEvidence result;
  result.rank = rank;
  result.pid = 1000 + rank;
  result.host = "n0";
  result.alive = result.answered = true;
  result.proc_state = "S";
  result.groups = {group("default", rank, world)};
  result.ops_begun = tail.size();
  result.tail = std::move(tail);
  result.stacks = std::string(
      "Thread 0x00007f0000000001 (most recent call first):\n"
      "  File \"/usr/lib/python3.11/threading.py\", line 324 in wait\n"
      "Current thread 0x00007f0000000002 (most recent call first):\n"
      "  File \"/home/u/train.py\", line 88 in load_batch\n"
      "  File \"/home/u/train.py\", line 120 in <module>\n");
  return result;
}

HangEvidence job(std::vector<RankEvidence> ranks) {
  HangEvidence result;
  result.job = "demo";
  result.world = static_cast<int>(ranks.size());
  result.now_ns = kNow;
  result.suspect_sec = 30;
  result.ranks = std::move(ranks);
  return result;
}

TEST(HangReport, JsonHoldsEveryRankWithItsThreads) {
  HangEvidence evidence = job({rankOf(0, 2, {op(OpKind::kAllreduce, 5, false)}), rankOf(1, 2, {})});
  evidence.ranks[0].tail[0].call_site = 3;
  evidence.ranks[0].call_sites[3] = "train.py:120 step";
  const json report = json::parse(hangReportJson(evidence, decide(evidence)));
  EXPECT_EQ(report["job"], "demo");
  EXPECT_EQ(report["culprits"][0]["rank"], 1);
  EXPECT_EQ(report["version"], kVerdictVersion);
  EXPECT_EQ(report["ranks"][0]["pending"][0]["op"], "all_reduce");
  EXPECT_EQ(report["ranks"][0]["pending"][0]["bytes"], 4u << 20);
  EXPECT_EQ(report["ranks"][0]["pending"][0]["call_site"], "train.py:120 step");
  EXPECT_EQ(report["ranks"][0]["threads"][1]["main"], true);
  EXPECT_EQ(report["ranks"][0]["threads"][1]["frames"][0],
            json({{"file", "/home/u/train.py"}, {"line", 88}, {"function", "load_batch"}}));
}

TEST(HangReport, GivesTheSameVerdictWhenItIsReplayed) {
  OpEntry other = op(OpKind::kBroadcast, 5, false, 0);
  other.signature = UINT64_MAX - 5;
  HangEvidence evidence =
      job({rankOf(0, 3, {op(OpKind::kAllreduce, 5, false)}), rankOf(1, 3, {other}),
           rankOf(2, 3, {op(OpKind::kAllreduce, 5, false)})});
  evidence.ranks[0].children = {{77, "Z", "python"}};
  const std::string first = hangReportJson(evidence, decide(evidence));
  const auto replayed = evidenceFromJson(first);
  ASSERT_TRUE(replayed);
  EXPECT_EQ(hangReportJson(*replayed, decide(*replayed)), first);
  EXPECT_FALSE(evidenceFromJson("{}"));
  EXPECT_FALSE(evidenceFromJson("no report"));
}

TEST(HangReport, HeadingsSayWhoHoldsTheGil) {
  HangEvidence evidence = job({rankOf(0, 1, {})});
  std::string stacks = evidence.ranks[0].stacks.text();
  for (int thread = 20; thread < 50; ++thread) {
    stacks = "Thread 0x00007f00000000" + std::to_string(thread) + " (most recent call first):\n" +
             stacks;
  }
  evidence.ranks[0].stacks = stacks;
  const Verdict verdict;
  EXPECT_THAT(hangReportText(evidence, verdict), Not(HasSubstr("GIL")));
  stacks +=
      "GIL held by 0x00007f0000000020, awaited by 0x00007f0000000002\nMain thread "
      "0x00007f0000000002\n";
  evidence.ranks[0].stacks = stacks;
  // Although not all threads are shown.
  EXPECT_THAT(
      hangReportText(evidence, verdict),
      AllOf(HasSubstr("main thread 0x00007f0000000002, waits for the GIL, newest call first\n"),
            HasSubstr("thread 0x00007f0000000020, holds the GIL, newest call first\n")));
  EXPECT_THAT(hangReportJson(evidence, verdict),
              HasSubstr(R"("awaits_gil_of":"0x00007f0000000020")"));
}

TEST(HangReport, TextFitsEightyColumnsAndATerminal) {
  HangEvidence evidence = job({rankOf(0, 2, {op(OpKind::kAllreduce, 5, false)}), rankOf(1, 2, {})});
  evidence.job = std::string(300, 'j') + "\x1b[2J\n";
  evidence.ranks[1].host = std::string(500, 'h');
  evidence.ranks[1].error = "no space " + std::string(200, 'e') + "\x1b]0;title\x07";
  evidence.ranks[0].groups = {group(std::string(87, 'g'), 0, 2)};
  evidence.ranks[0].stacks = "Current thread 0x1 (most recent call first):\n  File \"/" +
                             std::string(300, 'p') + ".py\", line 99999999999 in " +
                             std::string(300, 'f') + "\x1b[2J\n";
  std::istringstream text(hangReportText(evidence, decide(evidence)));
  for (std::string line; std::getline(text, line);) {
    EXPECT_LE(line.size(), 80u) << line;
    EXPECT_THAT(line, Not(HasSubstr("\x1b")));
  }
}

TEST(HangReport, SurvivesHostileEvidence) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    HangEvidence evidence;
    evidence.now_ns = static_cast<int64_t>(random());
    evidence.suspect_sec = std::numeric_limits<double>::quiet_NaN();
    for (size_t i = 0; i < random() % 5; ++i) {
      RankEvidence rank;
      rank.rank = static_cast<int>(random() % 4) - 1;
      rank.alive = (random() & 1) != 0;
      rank.groups.resize(random() % 4);
      for (OpGroup& group : rank.groups) {
        std::memset(static_cast<void*>(&group), static_cast<int>(random() % 256), sizeof(group));
      }
      rank.tail.resize(random() % 20);
      for (OpEntry& entry : rank.tail) {
        entry.begin_ns = random();
        entry.wait_begin_ns = random();
        entry.done_ns = random() % 2;
        entry.group = static_cast<uint32_t>(random() % 6);
        entry.seq = static_cast<uint32_t>(random());
        entry.peer = static_cast<int32_t>(random());
        entry.kind = static_cast<OpKind>(random() % 256);
        entry.bytes = random();
        entry.signature = random() % 3;
      }
      for (size_t byte = 0; byte < random() % 400; ++byte) {
        rank.error += static_cast<char>(random());
      }
      rank.stacks = rank.error;
      evidence.ranks.push_back(rank);
    }
    EXPECT_FALSE(json::parse(hangReportJson(evidence, decide(evidence))).is_discarded());
    EXPECT_FALSE(hangReportText(evidence, decide(evidence)).empty());
  }
}

TEST(Evidence, ReadsAnOpLog) {
  ManualClock clock;
  OpLog log(nullptr, 256, clock);
  std::vector<uint64_t> area(OpLog::areaBytes(256) / 8 + 1);
  log.moveTo(area.data(), 256);
  const uint32_t index = log.addGroup("default", 0, 2);
  OpLog::Op begun;
  begun.kind = OpKind::kAllreduce;
  begun.group = index;
  begun.seq = 1;
  log.begin(begun);
  RankEvidence rank;
  addOpLog(rank, area.data(), area.size() * 8, clock.nowNs() + 5'000'000'000);
  EXPECT_EQ(rank.error, "");
  ASSERT_EQ(rank.tail.size(), 1u);
  EXPECT_EQ(rank.tail[0].kind, OpKind::kAllreduce);
  EXPECT_GE(rank.heartbeat_age_ns, 5'000'000'000u);

  log.nameCallSite(7, "train.py:3 f");
  RankEvidence own, earlier;
  addOpLog(own, area.data(), area.size() * 8, clock.nowNs(), 64, static_cast<uint32_t>(::getpid()));
  EXPECT_EQ(own.tail.size(), 1u);
  EXPECT_EQ(own.call_sites.at(7), "train.py:3 f");
  addOpLog(earlier, area.data(), area.size() * 8, clock.nowNs(), 64,
           static_cast<uint32_t>(::getpid()) + 1);
  EXPECT_TRUE(earlier.tail.empty()) << "what the rank before it has done is not this one's";
  EXPECT_THAT(earlier.error, HasSubstr("has not begun its own"));
}

TEST(Evidence, NamesADamagedOpLog) {
  std::vector<uint64_t> area(OpLog::areaBytes(256) / 8 + 1, 0xEE);
  RankEvidence rank;
  addOpLog(rank, area.data(), area.size() * 8, kNow);
  EXPECT_THAT(rank.error, HasSubstr("op log"));
}

TEST(Evidence, KnowsWhetherAProcessIsAlive) {
  RankEvidence rank;
  rank.pid = ::getpid();
  addProcessState(rank);
  EXPECT_TRUE(rank.alive);
  EXPECT_EQ(rank.proc_state, "R");
  rank.pid = std::numeric_limits<int>::max();
  addProcessState(rank);
  EXPECT_FALSE(rank.alive);
}

TEST(ProcessState, TellsWhoIsStoppedAndByWhom) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, WUNTRACED), pid);
  EXPECT_EQ(tracerOf(pid), ::getpid());
  EXPECT_TRUE(processIsStopped(pid));
  EXPECT_FALSE(processIsStopped(::getpid()));
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(tracerOf(pid), 0);
  EXPECT_FALSE(processIsStopped(pid));
}

}  // namespace report_test
}  // namespace reft
