#include "hang_detect/verdict/suspect.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/hang_detect/evidence/evidence_maker.h"

namespace reft {
namespace suspect_test {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace)

std::string call(const std::string& file, const std::string& function) {
  return stackOf("  File \"" + file + "\", line 1 in " + function +
                 "\n  File \"/home/u/train.py\", line 9 in main\n");
}

struct Example {
  const char* rule;
  std::function<void(RankEvidence&)> change;
};

Example stands(const char* rule, const std::string& file, const std::string& function) {
  return {rule, [=](RankEvidence& rank) { rank.stacks = call(file, function); }};
}

// One rank for each row of the table, in the table's order.
const std::vector<Example>& examples() {
  static const std::vector<Example> kExamples = {
      {"left", [](RankEvidence& rank) { rank.alive = false, rank.said_bye = true; }},
      {"dead", [](RankEvidence& rank) { rank.alive = false; }},
      {"stopped", [](RankEvidence& rank) { rank.proc_state = "T"; }},
      {"traced", [](RankEvidence& rank) { rank.tracer_pid = 7; }},
      {"uninterruptible", [](RankEvidence& rank) { rank.proc_state = "D"; }},
      stands("debugger", "/usr/lib/python3.11/pdb.py", "interaction"),
      {"device_failed",
       [](RankEvidence& rank) {
         rank.driver.error = 700;
         rank.driver.error_sec = 41;
         rank.cpu_share = 1;
       }},
      {"waits_for_gil",
       [](RankEvidence& rank) {
         rank.stacks =
             "Thread 0x0000000000000009 (most recent call first):\n"
             "  File \"/home/u/native.py\", line 12 in crunch\n" +
             call("/home/u/train.py", "step") +
             "GIL held by 0x0000000000000009, awaited by 0x00007f0000000002\n"
             "Main thread 0x00007f0000000002\n";
       }},
      stands("shutting_down", "/x/torch/distributed/distributed_c10d.py", "destroy_process_group"),
      stands("restoring", "/x/reft/_session/resumer.py", "write"),
      stands("data_loading", "/x/torch/utils/data/dataloader.py", "_next_data"),
      stands("compiling", "/x/torch/_dynamo/convert_frame.py", "_compile"),
      stands("profiling", "/x/torch/profiler/profiler.py", "stop"),
      stands("checkpoint_io", "/x/torch/serialization.py", "save"),
      stands("joins_thread", "/usr/lib/python3.11/threading.py", "join"),
      stands("waits_for_thread", "/usr/lib/python3.11/queue.py", "get"),
      stands("waits_for_child", "/usr/lib/python3.11/subprocess.py", "wait"),
      {"waits_for_device",
       [](RankEvidence& r) {
         r.driver.known = true;
         r.driver.calls = {{r.pid, "cuStreamSynchronize", true, 40}};
         r.cpu_share = 1;
       }},
      {"busy", [](RankEvidence& rank) { rank.cpu_share = 1; }},
      {"blocking_io", [](RankEvidence& rank) { rank.wait_channel = "pipe_read"; }},
      {"user_code", [](RankEvidence&) {}},
  };
  return kExamples;
}

TEST(Suspect, EveryRuleCanBeReached) {
  ASSERT_EQ(examples().size(), suspectRules().size());
  for (size_t i = 0; i < examples().size(); ++i) {
    RankEvidence rank = rankOf(3, 4, after(1));
    examples()[i].change(rank);
    EXPECT_EQ(suspectRules()[i].name, std::string(examples()[i].rule));
    EXPECT_EQ(ruleFor(Suspect(rank)).name, std::string(examples()[i].rule));
    const Culprit culprit = describeRank(rank);
    EXPECT_EQ(culprit.reason, suspectRules()[i].reason);
    EXPECT_EQ(culprit.text.rfind("rank 3 ", 0), 0u) << culprit.text;
    EXPECT_GT(culprit.text.size(), std::string("rank 3 ").size());
  }
}

TEST(Suspect, AnEarlierRuleWinsOverEveryLaterStateOfTheProcess) {
  // A stopped rank stays `stopped`, whatever its stacks and the kernel say besides.
  RankEvidence rank = rankOf(0, 1, {});
  rank.proc_state = "T";
  for (size_t i = 3; i < examples().size(); ++i) {
    RankEvidence both = rank;
    examples()[i].change(both);
    if (both.proc_state == "T") {
      EXPECT_EQ(describeRank(both).reason, "stopped") << examples()[i].rule;
    }
  }
}

TEST(Suspect, NamesOfRulesAreUnique) {
  std::set<std::string> names;
  for (const SuspectRule& rule : suspectRules()) {
    EXPECT_TRUE(names.insert(rule.name).second) << rule.name;
  }
}

TEST(Suspect, ARankOfWhichNothingIsKnownIsOutsideAnyOp) {
  RankEvidence rank;
  rank.rank = 5;
  rank.alive = true;
  const Culprit culprit = describeRank(rank);
  EXPECT_EQ(culprit.text, "rank 5 is outside any op");
  EXPECT_FALSE(culprit.frame);
}

TEST(Suspect, TheFrameIsTheGilHoldersWhereItKeepsTheGil) {
  RankEvidence rank = rankOf(0, 1, {});
  const auto found = std::find_if(examples().begin(), examples().end(), [](const Example& one) {
    return std::string(one.rule) == "waits_for_gil";
  });
  ASSERT_NE(found, examples().end());
  found->change(rank);
  const Culprit culprit = describeRank(rank);
  EXPECT_EQ(culprit.thread, "0x0000000000000009");
  ASSERT_TRUE(culprit.frame);
  EXPECT_EQ(culprit.frame->function, "crunch");
}

// A rank whose main thread polls a queue while another thread trains, as under Ray.
RankEvidence trainsInAThread() {
  RankEvidence rank = rankOf(1, 2, {});
  rank.stacks = std::string(
      "Thread 0x00007f0000000009 (most recent call first):\n"
      "  File \"/home/u/job.py\", line 10 in fetch_features\n"
      "Thread 0x00007f0000000002 (most recent call first):\n"
      "  File \"/usr/lib/python3.11/queue.py\", line 180 in get\n"
      "  File \"/home/u/job.py\", line 30 in <module>\n"
      "Main thread 0x00007f0000000002\n");
  rank.proc_state = "S";
  rank.wait_channel = "unix_stream_read_generic";
  rank.callers = {{OpThread::of(0x7f0000000009, 77), "S", "hrtimer_nanosleep"}};
  return rank;
}

TEST(Suspect, TheThreadThatCallsOpsIsTheOneThatCounts) {
  RankEvidence rank = trainsInAThread();
  Culprit culprit = describeRank(rank);
  EXPECT_EQ(culprit.text,
            "rank 1 is outside any op, at job.py:10 fetch_features, not in its main thread");
  EXPECT_EQ(culprit.reason, "user_code");
  EXPECT_EQ(culprit.thread, "0x00007f0000000009");
  rank.callers[0].wait_channel = "pipe_read";
  EXPECT_EQ(describeRank(rank).reason, "blocking_io");
  rank.callers[0].state = "D";
  EXPECT_EQ(describeRank(rank).reason, "uninterruptible");
  rank.callers = {{OpThread::of(0x7f0000000002, 76), "S", "futex_wait_queue"}};
  culprit = describeRank(rank);
  EXPECT_EQ(culprit.reason, "waits_for_thread");
  EXPECT_EQ(culprit.thread, "0x00007f0000000002");
}

TEST(Suspect, ACallerWithoutPythonFramesDoesNotCount) {
  RankEvidence rank = trainsInAThread();
  const CallingThread training = rank.callers[0];
  rank.callers = {{OpThread::of(0x7f0000000055, 78), "R", ""}, training};  // autograd's, first
  EXPECT_EQ(describeRank(rank).thread, "0x00007f0000000009");
  rank.callers.pop_back();
  EXPECT_EQ(describeRank(rank).thread, "0x00007f0000000002");
}

TEST(Suspect, AProgramThatHasEndedIsNamedAtItsNewestOp) {
  RankEvidence rank = rankOf(1, 2, after(3));
  rank.call_sites[1] = "train.py:55 train";
  rank.stacks = stackOf("  File \"/usr/lib/python3.11/threading.py\", line 1590 in _shutdown\n");
  Culprit culprit = describeRank(rank);
  EXPECT_EQ(culprit.reason, "ended_early");
  EXPECT_EQ(culprit.text,
            "rank 1 has left the training loop and is shutting down, after its last op at "
            "train.py:55 train");
  ASSERT_TRUE(culprit.frame);
  EXPECT_EQ(culprit.frame->file, "train.py");
  EXPECT_EQ(culprit.frame->line, 55);
  EXPECT_EQ(culprit.frame->function, "train");
  rank.call_sites.clear();
  EXPECT_EQ(describeRank(rank).frame->function, "_shutdown");
}

}  // namespace suspect_test
}  // namespace reft
