#include "hang_detect/verdict/verdict.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/hang_detect/evidence/evidence_maker.h"

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"

namespace reft {
namespace verdict_test {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr OpKind kReduce = OpKind::kAllreduce;

void expectNamed(const Verdict& verdict, const std::string& what, const std::vector<int>& ranks,
                 VerdictState state = VerdictState::kHang) {
  EXPECT_EQ(stateName(verdict.state), std::string(stateName(state)));
  EXPECT_EQ(verdict.what, what);
  EXPECT_NE(confidenceName(verdict.confidence), std::string("undecidable"));
  EXPECT_EQ(ranksOf(verdict.culprits), ranks);
  EXPECT_THAT(verdict.candidates, IsEmpty());
}

void expectUndecidable(const Verdict& verdict, const std::string& what,
                       const std::vector<int>& between) {
  EXPECT_EQ(verdict.what, what);
  EXPECT_EQ(confidenceName(verdict.confidence), std::string("undecidable"));
  EXPECT_THAT(verdict.culprits, IsEmpty());
  EXPECT_EQ(ranksOf(verdict.candidates), between);
}

// Ranks 0 and 1 wait in all_reduce 6, rank 2 has not begun it.
HangEvidence missing() {
  const OpEntry open = op(kReduce, 6, false);
  return job(
      {rankOf(0, 3, after(5, {open})), rankOf(1, 3, after(5, {open})), rankOf(2, 3, after(5))});
}

TEST(Verdict, NamesTheRankThatHasNotBegunTheOpWithItsLine) {
  const Verdict verdict = decide(missing());
  expectNamed(verdict, "user_code", {2});
  EXPECT_EQ(verdict.pattern, "P1");
  EXPECT_EQ(verdict.confidence, Confidence::kCertain);
  EXPECT_THAT(verdict.victims, ElementsAre(0, 1));
  ASSERT_TRUE(verdict.culprits[0].frame);
  EXPECT_EQ(verdict.culprits[0].frame->line, 88);
  EXPECT_EQ(verdict.culprits[0].thread, "0x00007f0000000002");
  EXPECT_EQ(verdict.group, "default");
  EXPECT_EQ(verdict.op, "all_reduce");
  EXPECT_EQ(verdict.seq, 6u);
  EXPECT_NEAR(verdict.waited_sec, kStillSec, 0.1);
}

TEST(Verdict, TellsWhereTheDataWorkerStandsThatIsNotIdle) {
  HangEvidence evidence = missing();
  RankEvidence& rank = evidence.ranks[2];
  rank.stacks = stackOf(
      "  File \"/x/site-packages/torch/utils/data/dataloader.py\", line 1 in _try_get_data\n");
  const std::string below =
      "  File \"/x/site-packages/torch/utils/data/_utils/worker.py\", line 9 in _worker_loop\n"
      "  File \"/home/u/train.py\", line 3 in main\n";
  rank.children = {
      {70, "S", "idle",
       stackOf("  File \"/x/lib/python3.11/multiprocessing/queues.py\", line 1 in get\n" + below)},
      {71, "S", "none"},
      {72, "S", "busy", stackOf("  File \"/home/u/data.py\", line 12 in __getitem__\n" + below)}};
  EXPECT_THAT(
      decide(evidence).culprits.at(0).text,
      HasSubstr("waits for its data loader, whose worker pid 72 stands at data.py:12 __getitem__"));
  rank.children.pop_back();
  EXPECT_THAT(decide(evidence).culprits.at(0).text, Not(HasSubstr("worker")));
}

TEST(Verdict, TellsWhatTheMissingRankDoes) {
  const std::pair<const char*, const char*> kCases[] = {
      {"data_loading",
       "  File \"/x/site-packages/torch/utils/data/dataloader.py\", line 1 in _try_get_data\n"},
      {"checkpoint_io", "  File \"/x/site-packages/torch/serialization.py\", line 1 in save\n"},
      {"debugger", "  File \"/usr/lib/python3.11/pdb.py\", line 1 in interaction\n"},
      {"waits_for_thread", "  File \"/usr/lib/python3.11/threading.py\", line 1 in join\n"},
      {"waits_for_child", "  File \"/usr/lib/python3.11/subprocess.py\", line 1 in wait\n"},
      {"ended_early",
       "  File \"/x/site-packages/torch/distributed/distributed_c10d.py\", line 1 in "
       "destroy_process_group\n"},
  };
  for (const auto& [what, frame] : kCases) {
    HangEvidence evidence = missing();
    evidence.ranks[2].stacks =
        stackOf(std::string(frame) + "  File \"/home/u/train.py\", line 9 in f\n");
    const Verdict verdict = decide(evidence);
    expectNamed(verdict, what, {2});
    EXPECT_EQ(verdict.culprits[0].frame->line, 9);
  }
}

// DDP takes the future of its op and never calls wait(): there is no mark of a wait.
HangEvidence futures(const std::string& frames) {
  OpEntry open = op(kReduce, 6, false);
  open.wait_begin_ns = 0;
  HangEvidence evidence = job({rankOf(0, 2, after(5, {open})), rankOf(1, 2, after(5))});
  evidence.ranks[0].stacks = stackOf(frames);
  return evidence;
}

// Its main thread is in the data loader, another one of its threads in the user's code.
RankEvidence rankWithTwoThreads(const std::string& gil) {
  RankEvidence rank = missing().ranks[2];
  rank.stacks =
      "Thread 0x00007f0000000009 (most recent call first):\n"
      "  File \"/x/lib/python3.11/ctypes/__init__.py\", line 7 in call\n"
      "  File \"/home/u/native.py\", line 12 in crunch\n"
      "Thread 0x00007f0000000002 (most recent call first):\n"
      "  File \"/x/site-packages/torch/utils/data/dataloader.py\", line 1 in _try_get_data\n"
      "  File \"/home/u/train.py\", line 88 in load_batch\n" +
      gil + "Main thread 0x00007f0000000002\n";
  return rank;
}

TEST(Verdict, NamesTheLineOfTheThreadThatKeepsTheGilFromTheMainOne) {
  HangEvidence evidence = missing();
  evidence.ranks[2] =
      rankWithTwoThreads("GIL held by 0x00007f0000000009, awaited by 0x00007f0000000002\n");
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "waits_for_gil", {2});
  ASSERT_TRUE(verdict.culprits[0].frame);
  EXPECT_EQ(verdict.culprits[0].frame->file, "/home/u/native.py");
  EXPECT_EQ(verdict.culprits[0].frame->line, 12);
  EXPECT_EQ(verdict.culprits[0].thread, "0x00007f0000000009");
  EXPECT_EQ(verdict.culprits[0].text,
            "rank 2 waits for the GIL, at train.py:88 load_batch (inside dataloader.py:1 "
            "_try_get_data): thread "
            "0x00007f0000000009 holds the GIL at native.py:12 crunch (inside __init__.py:7 call)");
  // The same from the evidence that was written.
  const auto read = evidenceFromJson(hangReportJson(evidence, verdict));
  ASSERT_TRUE(read);
  EXPECT_EQ(decide(*read).culprits[0].text, verdict.culprits[0].text);
  // Neither changes what is seen of a rank that is stopped.
  evidence.ranks[2].proc_state = "T";
  expectNamed(decide(evidence), "stopped", {2});
}

TEST(Verdict, WhoHoldsTheGilForAMomentDoesNotMatter) {
  for (const char* gil : {"", "GIL held by 0x00007f0000000009\n",
                          "GIL held by 0x00007f0000000001, awaited by 0x00007f0000000002\n",
                          "GIL held by 0x00007f0000000009, awaited by 0x00007f0000000003\n"}) {
    HangEvidence evidence = missing();
    evidence.ranks[2] = rankWithTwoThreads(gil);
    const Verdict verdict = decide(evidence);
    expectNamed(verdict, "data_loading", {2});
    EXPECT_EQ(verdict.culprits[0].frame->line, 88);
    EXPECT_THAT(verdict.culprits[0].text, Not(HasSubstr("GIL")));
  }
}

TEST(Verdict, SaysThatTheMainThreadHoldsTheGil) {
  HangEvidence evidence = missing();
  evidence.ranks[2].stacks = evidence.ranks[2].stacks.text() + "GIL held by 0x00007f0000000002\n";
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "user_code", {2});
  EXPECT_EQ(verdict.culprits[0].text,
            "rank 2 is outside any op, at train.py:88 load_batch, and holds the GIL");
}

TEST(Verdict, AnOpWhoseFutureIsWaitedForIsAWait) {
  const char* kBackward =
      "  File \"/x/site-packages/torch/autograd/graph.py\", line 1 in _engine_run_backward\n";
  const Verdict verdict = decide(futures(kBackward));
  expectNamed(verdict, "user_code", {1});
  EXPECT_THAT(verdict.victims, ElementsAre(0));

  HangEvidence all_in = futures(kBackward);
  all_in.ranks[1] = all_in.ranks[0];
  all_in.ranks[1].rank = 1;
  all_in.ranks[1].groups = {group("default", 1, 2)};
  expectUndecidable(decide(all_in), "all_in", {});
}

TEST(Verdict, AnOpInFlightIsNoWaitOfARankThatIsElsewhere) {
  HangEvidence evidence = futures("  File \"/home/u/train.py\", line 9 in f\n");
  evidence.ranks[0].wait_channel = "hrtimer_nanosleep";
  EXPECT_EQ(decide(evidence).what, "outside");
}

TEST(Verdict, RunningCompiledCodeIsNotCompiling) {
  HangEvidence evidence = missing();
  const std::string top = "  File \"/x/site-packages/torch/";
  evidence.ranks[2].stacks = stackOf(top + "_dynamo/eval_frame.py\", line 1 in _fn\n");
  expectNamed(decide(evidence), "user_code", {2});
  evidence.ranks[2].stacks = stackOf(top + "_dynamo/convert_frame.py\", line 1 in _compile\n");
  expectNamed(decide(evidence), "compiling", {2}, VerdictState::kSlow);
}

TEST(Verdict, TellsWhatTheKernelSays) {
  HangEvidence evidence = missing();
  evidence.ranks[2].proc_state = "D";
  evidence.ranks[2].wait_channel = "nfs_wait";
  expectNamed(decide(evidence), "uninterruptible", {2});
  evidence = missing();
  evidence.ranks[2].wait_channel = "pipe_read";
  expectNamed(decide(evidence), "blocking_io", {2});
  evidence = missing();
}

// An evaluation of one rank, a garbage collection, a tokenisation, an endless loop: only time tells
// one from the other, also where the others wait at a place that they know.
TEST(Verdict, ARankThatIsBusyIsSlowUntilTenTimesTheSuspicionTime) {
  const char* kPlaces[][2] = {
      {"busy", "  File \"/home/u/evaluate.py\", line 12 in score\n"},
      {"data_loading",
       "  File \"/x/site-packages/torch/utils/data/dataloader.py\", line 1 in _next_data\n"},
      {"checkpoint_io", "  File \"/x/site-packages/torch/serialization.py\", line 1 in save\n"}};
  for (const auto& [what, frame] : kPlaces) {
    HangEvidence evidence = missing();
    evidence.ranks[2].cpu_share = 1;
    evidence.ranks[2].stacks =
        stackOf(frame + std::string("  File \"/home/u/a.py\", line 9 in f\n"));
    const Verdict slow = decide(evidence);
    expectNamed(slow, what, {2}, VerdictState::kSlow);
    EXPECT_TRUE(slow.at_work);
    EXPECT_EQ(slow.culprits[0].frame->line, what == std::string("busy") ? 12 : 9);
    EXPECT_THAT(slow.evidence, testing::Contains(HasSubstr("called hung only after 5 min")));
    evidence.suspect_sec = 3;  // 31 s is more than ten times that
    expectNamed(decide(evidence), what, {2}, VerdictState::kHang);
  }
  HangEvidence starved = missing();  // a machine with too few processors
  starved.ranks[2].proc_state = "R";
  starved.ranks[2].cpu_share = 0.09;
  expectNamed(decide(starved), "busy", {2}, VerdictState::kSlow);
  HangEvidence idle = missing();
  idle.ranks[2].cpu_share = 0.02;
  expectNamed(decide(idle), "user_code", {2}, VerdictState::kHang);
  HangEvidence stopped = missing();  // it was busy before
  stopped.ranks[2].proc_state = "T";
  stopped.ranks[2].cpu_share = 1;
  expectNamed(decide(stopped), "stopped", {2}, VerdictState::kHang);
}

TEST(Verdict, NamesADeadDataWorker) {
  HangEvidence evidence = missing();
  evidence.ranks[2].stacks =
      stackOf("  File \"/x/torch/utils/data/dataloader.py\", line 1 in _next_data\n");
  evidence.ranks[2].children = {{4711, "Z", "pt_data_worker"}};
  EXPECT_THAT(decide(evidence).culprits.at(0).text, HasSubstr("worker pid 4711 is dead"));
}

TEST(Verdict, SaysSoWhenTheOomKillerWasThere) {
  HangEvidence evidence = missing();
  evidence.ranks[2].alive = false;
  evidence.ranks[2].gone_ns = kNow - kSec;
  EXPECT_THAT(decide(evidence).culprits.at(0).text,
              HasSubstr("the launcher's log has its exit status"));
  evidence.ranks[2].oom_kills = 1;
  const Verdict verdict = decide(evidence);
  EXPECT_THAT(verdict.culprits.at(0).text,
              HasSubstr("the kernel's OOM killer has ended a process of its cgroup"));
  EXPECT_THAT(verdict.advice, HasSubstr("more host memory"));
  const auto again = evidenceFromJson(hangReportJson(evidence, verdict));
  ASSERT_TRUE(again);
  EXPECT_EQ(again->ranks.at(2).oom_kills, 1);
}

TEST(Verdict, FollowsTheEdgesToTheEnd) {
  // 0 waits for 1 in a collective, 1 in a receive from 2, 2 computes: most are victims.
  const RankEvidence zero = rankOf(0, 3, after(4, {op(kReduce, 5, false)}));
  const RankEvidence one = rankOf(1, 3, after(4, {op(OpKind::kRecv, 9, false, 2)}));
  expectNamed(decide(job({zero, one, rankOf(2, 3, after(4))})), "user_code", {2},
              VerdictState::kHang);
}

TEST(Verdict, NamesTheDeadButNotThoseThatFailedBecauseOfThem) {
  HangEvidence evidence = missing();
  evidence.ranks[2].alive = false;
  evidence.ranks[2].gone_ns = kNow - kSec;
  evidence.ranks[1].alive = false;
  evidence.ranks[1].gone_ns = kNow - kSec + 1000;
  evidence.ranks[1].tail.back().failed = true;
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "dead", {2});
  EXPECT_EQ(verdict.pattern, "P4");
}

TEST(Verdict, NamesOnlyTheFirstOfThoseThatTheLauncherEnded) {
  HangEvidence evidence = missing();
  for (int i = 0; i < 2; ++i) {
    evidence.ranks[static_cast<size_t>(2 - i)].alive = false;
    evidence.ranks[static_cast<size_t>(2 - i)].gone_ns = kNow - kSec + i * 100'000'000;
  }
  expectNamed(decide(evidence), "dead", {2});
}

TEST(Verdict, SaysNothingWhenAllEndTogether) {
  HangEvidence evidence = missing();
  for (RankEvidence& rank : evidence.ranks) {
    rank.alive = false;
    rank.gone_ns = kNow - kSec;
  }
  EXPECT_EQ(decide(evidence).state, VerdictState::kHealthy);
}

TEST(Verdict, NamesARankThatSaidByeAndIsWaitedFor) {
  HangEvidence evidence = missing();
  evidence.ranks[2].alive = false;
  evidence.ranks[2].said_bye = true;
  expectNamed(decide(evidence), "ended_early", {2});
}

TEST(Verdict, NamesTheStoppedEvenInsideTheOp) {
  const OpEntry open = op(kReduce, 6, false);
  HangEvidence evidence = missing();
  evidence.ranks[2].tail.push_back(open);
  evidence.ranks[2].proc_state = "T";
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "stopped", {2});
  EXPECT_THAT(verdict.advice, HasSubstr("kill -CONT 1002"));
}

TEST(Verdict, NamesTheMinorityOfADisagreement) {
  const auto with = [](auto change) {
    const OpEntry open = op(kReduce, 6, false);
    OpEntry other = open;
    other.signature = 8;
    change(other);
    return decide(job({rankOf(0, 3, after(5, {open})), rankOf(1, 3, after(5, {other})),
                       rankOf(2, 3, after(5, {open}))}));
  };
  expectNamed(with([](OpEntry& o) { o.kind = OpKind::kBroadcast; }), "op_mismatch", {1});
  expectNamed(with([](OpEntry& o) { o.bytes = 1000; }), "size_mismatch", {1});
  expectNamed(with([](OpEntry& o) { o.dtype = 5; }), "dtype_mismatch", {1});
}

// A screen cuts what comes last, and the waits of a large job fill it.
TEST(VerdictText, ADisagreementComesFirstWithALineForEachSide) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 9; ++r) {
    OpEntry open = op(kReduce, 6, false);
    OpEntry message = op(OpKind::kRecv, 1, false, (r + 1) % 9);
    message.group = 1;
    if (r == 2) {
      open.bytes = 12;
      open.signature = 8;
      open.call_site = 2;
    }
    ranks.push_back(rankOf(r, 9, after(5, {open, message})));
    ranks.back().groups.push_back(group("messages", r, 9));
    ranks.back().call_sites = {
        {1, "/home/somebody/experiments/a_project_with_a_long_name/november/b03/job.py:31 main"},
        {2, "/home/somebody/experiments/a_project_with_a_long_name/november/b03/job.py:17 test"}};
  }
  const HangEvidence evidence = job(ranks);
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "size_mismatch", {2});
  EXPECT_EQ(
      verdict.culprits[0].text,
      "rank 2 differs from the others in seq 6 of group default: it calls all_reduce (12 B, no "
      "dtype) at b03/job.py:17 test");
  EXPECT_EQ(verdict.evidence.at(0),
            "ranks disagree about seq 6 of group default:\n"
            "rank 2 calls all_reduce (12 B, no dtype) at b03/job.py:17 test\n"
            "ranks 0 1 3-8 call all_reduce (4.0 MiB, no dtype) at b03/job.py:31 main");
  const std::string screen = verdictText(evidence, verdict);
  EXPECT_THAT(screen,
              HasSubstr("- ranks disagree about seq 6 of group default:\n"
                        "    rank 2 calls all_reduce (12 B, no dtype) at b03/job.py:17 test\n"
                        "    ranks 0 1 3-8 call all_reduce (4.0 MiB, no dtype) at"));
  EXPECT_LT(screen.find("ranks disagree"), screen.find(" waits in recv"));
}

// Gloo ends a process that gets more bytes than it expects.
TEST(Verdict, WhoDiedInTheOpOfADisagreementDidNotCauseIt) {
  const OpEntry open = op(kReduce, 6, false);
  OpEntry larger = open;
  larger.signature = 8;
  larger.bytes = 1000;
  HangEvidence evidence = job({rankOf(0, 3, after(5, {open})), rankOf(1, 3, after(5, {larger})),
                               rankOf(2, 3, after(5, {open}))});
  evidence.ranks[2].alive = false;
  evidence.ranks[2].gone_ns = kNow - kSec;
  Verdict verdict = decide(evidence);
  expectNamed(verdict, "size_mismatch", {1});
  EXPECT_EQ(verdict.state, VerdictState::kHang);
  EXPECT_THAT(verdict.evidence, testing::Contains(HasSubstr("rank 2 ended in seq 6")));
  EXPECT_THAT(verdictText(evidence, verdict), HasSubstr(": crash, size_mismatch (likely)"));

  for (RankEvidence& rank : evidence.ranks) {  // and so they all do in the end
    rank.alive = false;
    rank.gone_ns = kNow - kSec + rank.rank;
  }
  expectNamed(decide(evidence), "size_mismatch", {1});

  // It had left the op: then it may have died of something else, and the others differ all the
  // same.
  evidence.ranks[0].alive = evidence.ranks[1].alive = true;
  evidence.ranks[2].tail.back().done_ns = evidence.ranks[2].tail.back().begin_ns + 1000;
  expectUndecidable(decide(evidence), "size_mismatch", {1, 2});
}

TEST(Verdict, NamesTheRankWithAnotherRoot) {
  const auto rank = [](int number, int root) {
    return rankOf(number, 3, after(5, {op(OpKind::kBroadcast, 6, false, root)}));
  };
  expectNamed(decide(job({rank(0, 0), rank(1, 0), rank(2, 1)})), "root_mismatch", {2});
}

TEST(Verdict, DoesNotChooseBetweenTwo) {
  OpEntry other = op(OpKind::kBroadcast, 6, false, 0);
  other.signature = 8;
  expectUndecidable(decide(job({rankOf(0, 2, after(5, {op(kReduce, 6, false)})),
                                rankOf(1, 2, after(5, {other}))})),
                    "op_mismatch", {0, 1});
}

TEST(Verdict, SaysThatRanksDisagreedAlthoughNothingHangs) {
  HangEvidence evidence =
      job({rankOf(0, 3, after(6)), rankOf(1, 3, after(6)), rankOf(2, 3, after(6))});
  evidence.ranks[1].tail[3].dtype = 5;
  evidence.ranks[1].tail[3].signature = 9;
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.state, VerdictState::kHealthy);
  ASSERT_EQ(verdict.disagreements.size(), 1u);
  EXPECT_EQ(verdict.disagreements[0].what, "dtype_mismatch");
  EXPECT_THAT(verdict.disagreements[0].minority, ElementsAre(1));
  EXPECT_FALSE(verdict.disagreements[0].waited_for);
}

TEST(Verdict, FindsCirclesOfSendsAndReceives) {
  for (const OpKind kind : {OpKind::kSend, OpKind::kRecv}) {
    const Verdict verdict =
        decide(job({rankOf(0, 2, {op(kind, 1, false, 1)}), rankOf(1, 2, {op(kind, 1, false, 0)})}));
    expectUndecidable(verdict, kind == OpKind::kSend ? "crossed_sends" : "crossed_recvs", {0, 1});
    EXPECT_EQ(verdict.pattern, "P6");
  }
}

TEST(Verdict, FindsACircleOverTwoGroups) {
  const auto rank = [](int number, uint32_t in) {
    RankEvidence result = rankOf(number, 2, {op(kReduce, 1, false, -1, in)});
    result.groups.push_back(group("other", number, 2));
    return result;
  };
  expectUndecidable(decide(job({rank(0, 0), rank(1, 1)})), "cycle", {0, 1});
}

TEST(Verdict, NamesTheRankOfACircleWhoseOrderIsNotTheOthers) {
  // Groups {0 1} and {2 3} of 4 ranks; all do an op in their pair, then one in the world. Rank 1
  // leaves the first out.
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 4; ++r) {
    std::vector<OpEntry> tail = after(5);
    if (r != 1) {
      tail.push_back(op(kReduce, 1, r >= 2, -1, 1));
    }
    if (r != 0) {
      tail.push_back(op(kReduce, 6, false));
    }
    ranks.push_back(rankOf(r, 4, tail));
    ranks.back().groups.push_back(group(r < 2 ? "a" : "b", r % 2, 2));
  }
  expectNamed(decide(job(ranks)), "cycle", {1});
}

TEST(Verdict, DoesNotChooseBetweenSenderAndReceiver) {
  OpEntry send = op(OpKind::kSend, 1, false, 1);
  OpEntry receive = op(OpKind::kRecv, 1, false, 0);
  receive.tag = 3;
  expectUndecidable(decide(job({rankOf(0, 2, {send}), rankOf(1, 2, {receive})})), "p2p_mismatch",
                    {0, 1});
  receive.tag = 0;
  receive.signature = 9;
  expectUndecidable(decide(job({rankOf(0, 2, {send}), rankOf(1, 2, {receive})})), "p2p_mismatch",
                    {0, 1});
  // A receive without a send, and the sender has gone on to a collective.
  expectUndecidable(decide(job({rankOf(0, 2, {op(kReduce, 1, false)}),
                                rankOf(1, 2, {op(OpKind::kRecv, 1, false, 0)})})),
                    "p2p_count_mismatch", {0, 1});
}

TEST(Verdict, BlamesNobodyWhenAllAreIn) {
  const OpEntry open = op(kReduce, 6, false);
  const Verdict verdict =
      decide(job({rankOf(0, 2, after(5, {open})), rankOf(1, 2, after(5, {open}))}));
  expectUndecidable(verdict, "all_in", {});
  EXPECT_EQ(verdict.pattern, "P3");
  EXPECT_EQ(verdict.state, VerdictState::kHang);
}

TEST(Verdict, BlamesNobodyHereForMembersElsewhere) {
  const OpEntry open = op(kReduce, 6, false);
  expectUndecidable(decide(job({rankOf(0, 4, after(5, {open})), rankOf(1, 4, after(5, {open}))})),
                    "elsewhere", {});
  // One that is missing here, too: others may be missing on the other node.
  expectUndecidable(decide(job({rankOf(0, 4, after(5, {open})), rankOf(1, 4, after(5))})),
                    "user_code", {1});
}

TEST(Verdict, BlamesNobodyWhoseLogDoesNotReachBack) {
  RankEvidence other = rankOf(1, 2, {});
  other.ops_begun = 5000;
  expectUndecidable(decide(job({rankOf(0, 2, after(5, {op(kReduce, 6, false)})), other})),
                    "elsewhere", {});
}

OpEntry onDevice(uint32_t seq) {  // wait() returned at once, and nobody asked whether it is done
  OpEntry result = op(kReduce, seq, false);
  result.wait_end_ns = result.wait_begin_ns + 100;
  return result;
}

TEST(Verdict, SeesThroughDeviceOpsThatAreNeverMarkedDone) {
  const std::vector<OpEntry> ahead = {onDevice(410), onDevice(411), onDevice(412)};
  const Verdict verdict = decide(job(
      {rankOf(0, 3, ahead), rankOf(1, 3, ahead), rankOf(2, 3, {onDevice(410), onDevice(411)})}));
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{2});
  EXPECT_EQ(verdict.seq, 412u);
  EXPECT_THAT(decide(job({rankOf(0, 2, ahead), rankOf(1, 2, ahead)})).culprits, IsEmpty());
}

// --- what streams say of ops

// Begun, its caller went on, and its stream, which was asked, has reached it or not.
OpEntry asked(uint32_t seq, bool reached, uint32_t group = 0) {
  OpEntry result = op(kReduce, seq, false, -1, group);
  result.wait_end_ns = result.wait_begin_ns + 100;
  result.reach_asked = result.pass_asked = true;
  result.reached = reached;
  return result;
}

OpEntry passed(uint32_t seq) {
  OpEntry result = asked(seq, true);
  result.passed = true;
  return result;
}

std::vector<OpEntry> passedUpTo(uint32_t seq, std::vector<OpEntry> more) {
  std::vector<OpEntry> ops;
  for (uint32_t i = 1; i <= seq; ++i) {
    ops.push_back(passed(i));
  }
  ops.insert(ops.end(), more.begin(), more.end());
  return ops;
}

HangEvidence behindOnRank2() {
  return job({rankOf(0, 3, passedUpTo(5, {asked(6, true)})),
              rankOf(1, 3, passedUpTo(5, {asked(6, true), asked(7, false)})),
              rankOf(2, 3, passedUpTo(5, {asked(6, false)}))});
}

TEST(Verdict, NamesTheRankWhoseDeviceDoesNotReachTheOp) {
  HangEvidence evidence = behindOnRank2();
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{2});
  EXPECT_EQ(verdict.what, "device_behind");
  EXPECT_EQ(verdict.seq, 6u);
  EXPECT_THAT(verdict.victims, ElementsAre(0, 1));
  EXPECT_THAT(verdict.culprits[0].text,
              HasSubstr("the device of rank 2 has not reached all_reduce"));
  // A spinning host is no excuse, but a new place is, as long kernels exist.
  evidence.ranks[2].cpu_share = 1;
  EXPECT_EQ(decide(evidence).state, verdict.state);
}

TEST(Verdict, CallsALateDeviceHungWhereOthersHaveNotWaitedSoLong) {
  HangEvidence evidence = behindOnRank2();
  EXPECT_EQ(decide(evidence).state, VerdictState::kSlow);  // nothing has ended at this place
  for (RankEvidence& rank : evidence.ranks) {
    for (OpEntry& entry : rank.tail) {
      entry.done_ns = entry.passed ? entry.begin_ns + 1000 : 0;
    }
  }
  EXPECT_EQ(decide(evidence).state, VerdictState::kHang);
}

// DDP waits on streams only, through futures: nothing says when they have passed an op.
TEST(Verdict, AnOpWhoseEndWouldHaveBeenSeenHoldsTheDevice) {
  const auto withFuture = [](bool reached) {
    OpEntry result = asked(6, reached);
    result.wait_begin_ns = result.wait_end_ns = 0;
    result.pass_asked = false;
    result.end_seen = true;
    return result;
  };
  const auto evidence = [&](OpEntry in) {
    return job({rankOf(0, 3, passedUpTo(5, {in})), rankOf(1, 3, passedUpTo(5, {in})),
                rankOf(2, 3, passedUpTo(5, {withFuture(false)}))});
  };
  const Verdict verdict = decide(evidence(withFuture(true)));
  EXPECT_EQ(verdict.what, "device_behind");
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{2});
  OpEntry unseen = withFuture(true);
  unseen.end_seen = false;
  EXPECT_THAT(decide(evidence(unseen)).culprits, IsEmpty());
}

TEST(Verdict, FollowsALateDeviceToTheOpInWhichItStands) {
  // Rank 2 is late for op 6 of all, as its stream stands in op 1 of group 1, where rank 3's host
  // does not come.
  const OpEntry inner = asked(1, true, 1);
  HangEvidence evidence = job(
      {rankOf(0, 4, passedUpTo(5, {asked(6, true)})), rankOf(1, 4, passedUpTo(5, {asked(6, true)})),
       rankOf(2, 4, passedUpTo(5, {inner, asked(6, false)})), rankOf(3, 4, passedUpTo(5, {}))});
  for (RankEvidence& rank : evidence.ranks) {
    if (rank.rank >= 2) {
      rank.groups.push_back(group("pair", rank.rank - 2, 2));
    }
  }
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{3});
  EXPECT_NE(verdict.what, "device_behind");
}

TEST(Verdict, BlamesNobodyIfAllDevicesAreInTheOp) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.push_back(rankOf(r, 3, passedUpTo(5, {asked(6, true)})));
  }
  const Verdict verdict = decide(job(ranks));
  expectUndecidable(verdict, "all_in", {});
  EXPECT_THAT(verdict.evidence, ::testing::Contains(HasSubstr("the devices of all members")));
}

TEST(Verdict, SaysThatNoDeviceHasReachedTheOp) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.push_back(rankOf(r, 3, passedUpTo(5, {asked(6, false)})));
  }
  const Verdict verdict = decide(job(ranks));
  expectUndecidable(verdict, "device_behind", {0, 1, 2});
  EXPECT_EQ(verdict.state, VerdictState::kSlow);
}

TEST(Verdict, TakesNothingFromADeviceThatNobodyAskedSince) {
  HangEvidence evidence = behindOnRank2();
  evidence.ranks[1].tail.pop_back();
  for (RankEvidence& rank : evidence.ranks) {
    forgetDevice(rank);
  }
  EXPECT_THAT(decide(evidence).culprits, IsEmpty());
}

TEST(Verdict, NamesTheSenderWhoseDeviceDoesNotReachItsSend) {
  OpEntry receives = op(OpKind::kRecv, 1, false, 1);
  receives.wait_end_ns = receives.wait_begin_ns + 100;
  receives.reach_asked = receives.reached = receives.pass_asked = true;
  OpEntry sends = op(OpKind::kSend, 1, false, 0);
  sends.wait_end_ns = sends.wait_begin_ns + 100;
  sends.reach_asked = true;
  const Verdict verdict =
      decide(job({rankOf(0, 2, passedUpTo(5, {receives})), rankOf(1, 2, passedUpTo(5, {sends}))}));
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  EXPECT_EQ(verdict.what, "device_behind");
}

// --- what the preloaded library says of the driver

TEST(Verdict, SaysThatTheMissingRankWaitsForItsDevice) {
  HangEvidence evidence = missing();
  RankEvidence& rank = evidence.ranks[2];
  rank.driver.known = true;
  rank.driver.launches = 14220;
  rank.driver.kernel = "sgemm";
  rank.driver.launch_sec = 33;
  rank.driver.calls = {{rank.pid + 1, "cuStreamSynchronize", true, 40},
                       {rank.pid, "cuStreamSynchronize", true, 32}};
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "waits_for_device", {2});
  EXPECT_THAT(verdict.culprits[0].text,
              HasSubstr("waits for its device in cuStreamSynchronize for"));
  EXPECT_THAT(verdict.culprits[0].text,
              HasSubstr("the newest of 14220 launches was sgemm, 33.0 s ago"));
  // Another thread's wait, and a call that does not wait, say nothing of the one that trains.
  rank.driver.calls = {{rank.pid + 1, "cuStreamSynchronize", true, 40},
                       {rank.pid, "cuLaunchKernel", false, 32}};
  expectNamed(decide(evidence), "user_code", {2});
}

// --- what NCCL's plugin says of an op that all are in

// A ring of ranks; rank 1's send waits for `cause`, all others for data.
HangEvidence allInNccl(NcclCause cause) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.push_back(rankOf(r, 3, after(5, {op(kReduce, 6, false)})));
    ranks.back().node = r;
    ranks.back().host = "n" + std::to_string(r);
    NcclFinding finding;
    finding.comm = 7;
    finding.rank = 2 - r;  // ranks of a communicator are numbers of their own
    finding.ranks = finding.nodes = 3;
    finding.in_op = true;
    finding.op = {"AllReduce", 6};
    finding.algo = "RING";
    finding.proxy = NcclProxy::kRuns;
    const int next = (finding.rank + 1) % 3, before = (finding.rank + 2) % 3;
    finding.edges = {{next, 0, true, true, r == 1 ? cause : NcclCause::kOwnGpuFills},
                     {before, 0, false, false, NcclCause::kDataComes}};
    ranks.back().nccl = {finding};
  }
  return job(ranks);
}

TEST(InsideNccl, NamesTheLinkThatCarriesNothing) {
  const HangEvidence evidence = allInNccl(NcclCause::kNetworkSends);
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.what, "network");
  EXPECT_THAT(verdict.culprits, IsEmpty());
  ASSERT_EQ(verdict.dead_paths.size(), 1u);
  EXPECT_EQ(verdict.dead_paths[0].from, 1u);
  EXPECT_EQ(verdict.dead_paths[0].to, 0u);
  EXPECT_THAT(
      verdict.evidence,
      ::testing::Contains(HasSubstr("NCCL: nothing comes to rank 0 (n0) from rank 1 (n1)")));
  // The report is all that there is to decide from.
  const auto read = evidenceFromJson(hangReportJson(evidence, verdict));
  ASSERT_TRUE(read);
  EXPECT_EQ(decide(*read).what, "network");
}

TEST(InsideNccl, NamesTheRankWhoseProxyThreadStands) {
  HangEvidence evidence = allInNccl(NcclCause::kOwnGpuFills);
  evidence.ranks[2].nccl[0].proxy = NcclProxy::kStuck;
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.what, "proxy_stands");
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{2});
}

TEST(InsideNccl, DataThatStillMovesAreNoHang) {
  HangEvidence evidence = allInNccl(NcclCause::kNetworkSends);
  evidence.ranks[0].nccl[0].advancing = true;
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.state, VerdictState::kSlow);
  EXPECT_THAT(verdict.culprits, IsEmpty());
}

TEST(InsideNccl, IsOfNoAccountWhereARankHasNotBegunTheOp) {
  HangEvidence evidence = allInNccl(NcclCause::kNetworkSends);
  evidence.ranks[2].tail = after(5);
  EXPECT_EQ(ranksOf(decide(evidence).culprits), std::vector<int>{2});
}

// --- what connections say of the network

// Four ranks on four nodes, all in the op. Rank r has the address 10.0.0.<r + 1>:1000.
HangEvidence allInOverTcp() {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.push_back(rankOf(r, 4, after(5, {op(kReduce, 6, false)})));
    ranks.back().node = r;
    ranks.back().host = "n" + std::to_string(r);
    ranks.back().connections.addresses = {"10.0.0." + std::to_string(r + 1) + ":1000"};
  }
  HangEvidence evidence = job(ranks);
  evidence.nodes = 4;
  return evidence;
}

void kill(HangEvidence& evidence, int from, int to) {
  evidence.ranks[static_cast<size_t>(from)].connections.dead.push_back(
      {"10.0.0." + std::to_string(from + 1) + ":1000", "10.0.0." + std::to_string(to + 1) + ":1000",
       1 << 20, 7});
}

TEST(Network, DeadConnectionsBothWaysAreOnePair) {
  HangEvidence evidence = allInOverTcp();
  kill(evidence, 2, 1);
  kill(evidence, 1, 2);
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.what, "network");
  EXPECT_EQ(verdict.confidence, Confidence::kLikely);
  EXPECT_THAT(verdict.culprits, IsEmpty());
  ASSERT_EQ(verdict.dead_paths.size(), 1u);
  EXPECT_TRUE(verdict.dead_paths[0].both);
  EXPECT_THAT(verdict.evidence,
              ::testing::Contains(HasSubstr("nothing passes between rank 1 (n1) and rank 2 (n2)")));
  EXPECT_THAT(verdictText(evidence, verdict), HasSubstr("the network, and no rank"));
}

TEST(Network, SaysWhichNodeAllDeadConnectionsHaveInCommon) {
  HangEvidence evidence = allInOverTcp();
  kill(evidence, 1, 2);
  kill(evidence, 2, 3);
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.dead_paths.size(), 2u);
  EXPECT_THAT(verdict.evidence, ::testing::Contains("node 2 is one end of all of them"));
  EXPECT_THAT(verdict.evidence,
              ::testing::Contains(HasSubstr("rank 2 (n2) does not acknowledge what rank 1 (n1)")));
}

TEST(Network, AConnectionToNoRankProvesNothing) {
  HangEvidence evidence = allInOverTcp();
  evidence.ranks[1].connections.dead = {{"10.0.0.2:1000", "10.0.0.9:29500", 100, 7}};
  expectUndecidable(decide(evidence), "all_in", {});
}

TEST(Network, DoesNotExcuseARankThatIsMissing) {
  HangEvidence evidence = allInOverTcp();
  evidence.ranks[3].tail = after(5);
  kill(evidence, 1, 2);
  expectNamed(decide(evidence), "user_code", {3});
}

TEST(Network, AddressesOfTheHostItselfAreOthersOnOtherNodes) {
  HangEvidence evidence = allInOverTcp();
  for (RankEvidence& rank : evidence.ranks) {
    rank.connections.addresses = {"127.0.0.1:1000"};
  }
  evidence.ranks[1].connections.dead = {{"127.0.0.1:2000", "127.0.0.1:1000", 100, 7}};
  EXPECT_THAT(decide(evidence).dead_paths, IsEmpty());  // that is rank 1 itself
}

TEST(Verdict, CountsAWaitBehindAnOpThatIsOverForTheWaiter) {
  const RankEvidence late = rankOf(1, 2, after(4));
  const OpEntry held = op(OpKind::kBarrier, 6, false);
  const Verdict verdict =
      decide(job({rankOf(0, 2, after(4, {op(OpKind::kBroadcast, 5, true, 0), held})), late}));
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  EXPECT_EQ(verdict.seq, 5u);
}

// --- what only looks like a hang

TEST(Healthy, NobodyWaits) {
  const Verdict verdict = decide(job({rankOf(0, 2, after(5)), rankOf(1, 2, after(5))}));
  EXPECT_EQ(verdict.state, VerdictState::kHealthy);
  EXPECT_EQ(verdict.pattern, "P7");
}

TEST(Healthy, AWaitThatIsYoungIsSlowAtMost) {
  HangEvidence evidence = missing();
  evidence.suspect_sec = 60;
  expectNamed(decide(evidence), "user_code", {2}, VerdictState::kSlow);
}

TEST(Healthy, TheMissingRankCompiles) {
  HangEvidence evidence = missing();
  evidence.ranks[2].stacks =
      stackOf("  File \"/x/site-packages/torch/_inductor/compile_fx.py\", line 1 in compile_fx\n");
  expectNamed(decide(evidence), "compiling", {2}, VerdictState::kSlow);
}

TEST(Healthy, TheMissingRankWritesACheckpoint) {
  HangEvidence evidence = missing();
  evidence.ranks[2].stacks =
      stackOf("  File \"/x/site-packages/torch/serialization.py\", line 1 in save\n");
  evidence.ranks[2].io_bytes = 1 << 30;
  expectNamed(decide(evidence), "checkpoint_io", {2}, VerdictState::kSlow);
  evidence.ranks[2].io_bytes = 0;
  expectNamed(decide(evidence), "checkpoint_io", {2}, VerdictState::kHang);
}

TEST(Healthy, WhatTheMissingRankStartedWorks) {
  HangEvidence evidence = missing();
  evidence.ranks[2].stacks = stackOf(
      "  File \"/usr/lib/python3.11/threading.py\", line 1 in wait\n"
      "  File \"/x/train.py\", line 7 in tokenize\n");
  evidence.ranks[2].cpu_share = 0;
  evidence.ranks[2].children_cpu_share = 1.9;
  expectNamed(decide(evidence), "waits_for_thread", {2}, VerdictState::kSlow);
  evidence.ranks[2].children_cpu_share = 0.2;  // shares a processor with others, or polls
  expectNamed(decide(evidence), "waits_for_thread", {2}, VerdictState::kHang);
  evidence.ranks[2].running_children = 1;
  expectNamed(decide(evidence), "waits_for_thread", {2}, VerdictState::kSlow);
  evidence.ranks[2].children_cpu_share = 0.05;
  expectNamed(decide(evidence), "waits_for_thread", {2}, VerdictState::kHang);
}

TEST(Healthy, AThreadOfTheMissingRankWorksOnACrowdedMachine) {
  HangEvidence evidence = missing();
  evidence.ranks[2].cpu_share = 0.2;
  expectNamed(decide(evidence), "user_code", {2}, VerdictState::kHang);
  evidence.ranks[2].running_threads = 1;
  expectNamed(decide(evidence), "busy", {2}, VerdictState::kSlow);
}

TEST(Healthy, OthersWaitWhereTheyNeverWaitedUntilItHasTakenTenTimesAsLong) {
  const OpEntry barrier = op(OpKind::kBarrier, 6, false);
  HangEvidence evidence = job({rankOf(0, 2, after(5)), rankOf(1, 2, after(5, {barrier}))});
  evidence.ranks[0].cpu_share = 1;
  expectNamed(decide(evidence), "busy", {0}, VerdictState::kSlow);
  evidence.suspect_sec = 3;
  expectNamed(decide(evidence), "busy", {0}, VerdictState::kHang);
}

TEST(Healthy, OthersHaveWaitedAsLongThereBefore) {
  HangEvidence evidence = missing();
  for (size_t r = 0; r < 2; ++r) {
    evidence.ranks[r].tail[2].begin_ns -= 20 * kSec;
  }
  expectNamed(decide(evidence), "user_code", {2}, VerdictState::kSlow);
}

// Rank 0 mostly comes last, so it never waited; but rank 1 did.
TEST(Healthy, AnotherRankHasWaitedAsLongThereBefore) {
  HangEvidence evidence = missing();
  evidence.ranks[1].tail[2].begin_ns -= 20 * kSec;
  expectNamed(decide(evidence), "user_code", {2}, VerdictState::kSlow);
}

TEST(Healthy, OneOfThoseThatAreWaitedForHasJustStoppedCompiling) {
  HangEvidence evidence = missing();
  evidence.ranks[1].tail.pop_back();
  evidence.ranks[2].stacks =
      stackOf("  File \"/x/site-packages/torch/_inductor/compile_fx.py\", line 1 in compile_fx\n");
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "missing", {1, 2}, VerdictState::kSlow);
  EXPECT_TRUE(verdict.at_work);
  EXPECT_TRUE(verdict.could_come);
  evidence.ranks[1].proc_state = "T";
  EXPECT_FALSE(decide(evidence).could_come);
  EXPECT_EQ(decide(evidence).state, VerdictState::kHang);
}

TEST(Healthy, TheFirstOpOfAGroupTakesAsLongAsTenTimesWhatIsSuspicious) {
  OpEntry first = op(kReduce, 1, false, -1, 1);
  first.call_site = 2;
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.push_back(rankOf(r, 2, after(5, {first})));
    ranks.back().groups.push_back(group("new", r, 2));
  }
  HangEvidence evidence = job(ranks);
  Verdict verdict = decide(evidence);
  expectUndecidable(verdict, "all_in", {});
  EXPECT_EQ(verdict.state, VerdictState::kSlow);
  evidence.suspect_sec = 3.2;  // 31 s is less than ten times that
  EXPECT_EQ(decide(evidence).state, VerdictState::kSlow);
  evidence.suspect_sec = 3;
  EXPECT_EQ(decide(evidence).state, VerdictState::kHang);
}

TEST(Healthy, ATracerHoldsTheRank) {
  HangEvidence evidence = missing();
  evidence.ranks[2].proc_state = "t";
  evidence.ranks[2].tracer_pid = 9;
  expectNamed(decide(evidence), "traced", {2}, VerdictState::kSlow);
}

TEST(Healthy, TheObserverWasAwayForMostOfTheTime) {
  HangEvidence evidence = missing();
  evidence.away_sec = 20;
  const Verdict verdict = decide(evidence);
  expectNamed(verdict, "user_code", {2}, VerdictState::kSlow);
  EXPECT_NEAR(verdict.waited_sec, kStillSec - 20, 0.1);
}

TEST(AtWork, IsWhoUsesAProcessorFilesOrChildrenOrIsNotKnown) {
  RankEvidence idle = missing().ranks[2];
  idle.cpu_share = 0.1;
  idle.io_bytes = 100;
  Culprit culprit;
  EXPECT_FALSE(atWork(idle, culprit));
  RankEvidence busy = idle, starved = idle, reads = idle, loads = idle, unknown = idle,
               frozen = idle, dead = idle;
  starved.proc_state = "R";
  busy.cpu_share = 0.9;
  reads.io_bytes = 1 << 20;
  loads.children = {{2000, "S", "python"}, {2001, "R", "python"}};
  unknown.cpu_share = -1;
  for (const RankEvidence& rank : {busy, starved, reads, loads, unknown}) {
    EXPECT_TRUE(atWork(rank, culprit));
  }
  frozen.proc_state = "T";
  frozen.cpu_share = dead.cpu_share = -1;
  dead.alive = false;
  EXPECT_FALSE(atWork(frozen, culprit));
  EXPECT_FALSE(atWork(dead, culprit));
  culprit.reason = "compiling";
  EXPECT_TRUE(atWork(idle, culprit));
}

TEST(AtDebuggerPrompt, IsToldByTheMainThread) {
  RankEvidence rank = missing().ranks[2];
  EXPECT_FALSE(atDebuggerPrompt(rank));
  for (const char* frame : {"File \"/usr/lib/python3.11/pdb.py\", line 1 in user_line",
                            "File \"/x/pydevd.py\", line 1 in do_wait_suspend",
                            "File \"/usr/lib/python3.11/code.py\", line 1 in interact"}) {
    rank.stacks = stackOf(std::string("  File \"/usr/lib/python3.11/bdb/x.py\", line 1 in f\n  ") +
                          frame + "\n");
    EXPECT_TRUE(atDebuggerPrompt(rank)) << frame;
  }
}

TEST(Slow, NamesTheRankThatTheOthersAlwaysWaitFor) {
  const auto ranks = [](auto isLast) {
    std::vector<RankEvidence> result;
    for (int r = 0; r < 3; ++r) {
      std::vector<OpEntry> tail;
      for (uint32_t seq = 1; seq <= 12; ++seq) {
        OpEntry entry = op(kReduce, seq, true);
        entry.begin_ns =
            static_cast<uint64_t>(kNow - (20 - static_cast<int64_t>(seq)) * 100'000'000);
        entry.done_ns = entry.begin_ns + (isLast(r, seq) ? 1'000'000 : 50'000'000);
        entry.wait_begin_ns = entry.begin_ns;
        entry.wait_end_ns = entry.done_ns;
        tail.push_back(entry);
      }
      result.push_back(rankOf(r, 3, tail));
    }
    return job(result);
  };
  expectNamed(decide(ranks([](int r, uint32_t) { return r == 1; })), "straggler", {1},
              VerdictState::kSlow);
  EXPECT_THAT(decide(ranks([](int r, uint32_t seq) {
                return static_cast<uint32_t>(r) == seq % 3;
              })).culprits,
              IsEmpty());
}

// A step of a job whose rank 1 comes 50 ms late to the first of two collectives; when it is asked,
// the others wait for it in the next one.
TEST(Slow, NamesAStragglerThatTheOthersWaitForJustNow) {
  const auto evidence = [](int64_t held_ms) {
    std::vector<RankEvidence> result;
    for (int r = 0; r < 4; ++r) {
      std::vector<OpEntry> tail;
      const int64_t end_ns = kNow - held_ms * 1'000'000;
      for (uint32_t seq = 1; seq <= 24; ++seq) {
        OpEntry entry = op(kReduce, seq, true);
        const bool late = r == 1 && seq % 2 == 1;
        const int64_t done_ns = end_ns - (24 - static_cast<int64_t>(seq)) / 2 * 60'000'000;
        entry.begin_ns =
            static_cast<uint64_t>(done_ns - (late || seq % 2 == 0 ? 1'000'000 : 50'000'000));
        entry.done_ns = static_cast<uint64_t>(done_ns);
        entry.wait_begin_ns = entry.begin_ns;
        entry.wait_end_ns = entry.done_ns;
        tail.push_back(entry);
      }
      if (r != 1) {
        OpEntry entry = op(kReduce, 25, false);
        entry.begin_ns = entry.wait_begin_ns = static_cast<uint64_t>(end_ns);
        tail.push_back(entry);
      }
      result.push_back(rankOf(r, 4, tail));
    }
    return job(result);
  };
  const Verdict verdict = decide(evidence(30));
  expectNamed(verdict, "straggler", {1}, VerdictState::kSlow);
  EXPECT_THAT(verdict.culprits[0].text,
              AllOf(HasSubstr("last in 12 of 24 collectives"), HasSubstr("by 49.0 ms on average")));
  // It has never waited so long: this may be a hang that begins.
  EXPECT_NE(decide(evidence(5'000)).what, "straggler");
}

TEST(Slow, WhoIsLastForAMomentIsNotNamed) {
  const auto evidence = [](int64_t held_ms) {
    std::vector<RankEvidence> result;
    for (int r = 0; r < 3; ++r) {
      std::vector<OpEntry> held;
      if (r != 1) {
        held = {op(kReduce, 6, false)};
        held[0].begin_ns = held[0].wait_begin_ns =
            static_cast<uint64_t>(kNow - held_ms * 1'000'000);
      }
      result.push_back(rankOf(r, 3, after(5, held)));
    }
    return job(result);
  };
  EXPECT_EQ(decide(evidence(40)).what, "progressing");
  EXPECT_EQ(decide(evidence(40)).state, VerdictState::kHealthy);
  EXPECT_THAT(decide(evidence(3'000)).culprits, ElementsAre(::testing::Field(&Culprit::rank, 1)));
}

TEST(Verdict, HasNotesOnTheHardwareAsEvidenceAndDecidesAsWithout) {
  HangEvidence evidence =
      job({rankOf(0, 2, after(5, {op(kReduce, 6, false)})), rankOf(1, 2, after(5))});
  evidence.ranks[1].stacks = stackOf("  File \"/home/u/train.py\", line 88 in load_batch\n");
  const Verdict without = decide(evidence);
  evidence.nodes = 2;
  evidence.hardware = {{1, true, "GPU 3 fell off the bus"}};
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.evidence.back(), "node 1: GPU 3 fell off the bus");
  EXPECT_EQ(verdict.state, without.state);
  EXPECT_EQ(verdict.what, without.what);
  EXPECT_EQ(verdict.remedy, without.remedy);
  EXPECT_EQ(ranksOf(verdict.culprits), ranksOf(without.culprits));
  EXPECT_NE(verdictText(evidence, verdict).find("- node 1: GPU 3 fell off the bus"),
            std::string::npos);
}

TEST(VerdictText, FitsOneScreen) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 40; ++r) {
    ranks.push_back(rankOf(r, 40,
                           after(5, r % 2 == 0 ? std::vector<OpEntry>{op(kReduce, 6, false)}
                                               : std::vector<OpEntry>{})));
    ranks.back().host = std::string(200, 'h');
    ranks.back().stacks = stackOf("  File \"/" + std::string(300, 'p') +
                                  ".py\", line 99999999999 in " + std::string(300, 'f') + "\n");
  }
  HangEvidence evidence = job(ranks);
  evidence.job = std::string(300, 'j') + "\x1b[2J";
  std::istringstream text(verdictText(evidence, decide(evidence)));
  size_t lines = 0;
  for (std::string line; std::getline(text, line); ++lines) {
    EXPECT_LE(line.size(), 80u);
    EXPECT_EQ(line.find('\x1b'), std::string::npos);
  }
  EXPECT_LE(lines, 24u);
  EXPECT_GT(lines, 6u);
}

}  // namespace verdict_test
}  // namespace reft
