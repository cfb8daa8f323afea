// What several nodes know, put together: clocks, silent nodes, and the way between the nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"
#include "tests/unit/hang_detect/evidence/evidence_maker.h"

namespace reft {
namespace {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace): the words of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Ranks 0 and 1 of four wait in all_reduce 6.
HangEvidence firstNode() {
  HangEvidence evidence = job({rankOf(0, 4, after(5, {op(OpKind::kAllreduce, 6, false)})),
                               rankOf(1, 4, after(5, {op(OpKind::kAllreduce, 6, false)}))});
  evidence.world = 4;
  evidence.nodes = 2;
  return evidence;
}

// Rank 2 waits as well, rank 3 has not begun it. Their clock is `behind_ns` behind the first
// node's.
HangEvidence secondNode(int64_t behind_ns) {
  HangEvidence evidence =
      job({rankOf(2, 4, after(5, {op(OpKind::kAllreduce, 6, false)})), rankOf(3, 4, after(5))});
  evidence.node = 1;
  evidence.now_ns = kNow - behind_ns;
  for (RankEvidence& rank : evidence.ranks) {
    rank.node = 1;
    rank.host = "n1";
    rank.heartbeat_age_ns = static_cast<uint64_t>(kStillSec * kSec);
    for (OpEntry& op : rank.tail) {
      for (uint64_t* at :
           {&op.begin_ns, &op.enqueued_ns, &op.wait_begin_ns, &op.wait_end_ns, &op.done_ns}) {
        *at -= *at == 0 ? 0 : static_cast<uint64_t>(behind_ns);
      }
    }
  }
  return evidence;
}

TEST(Nodes, ARankOfAnotherNodeIsNamedWithItsHost) {
  HangEvidence evidence = firstNode();
  EXPECT_EQ(decide(evidence).what, "elsewhere");
  addNode(evidence, secondNode(900 * kSec), 900 * kSec, 0);
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.state, VerdictState::kHang);
  ASSERT_THAT(ranksOf(verdict.culprits), ElementsAre(3));
  EXPECT_EQ(verdict.culprits[0].host, "n1");
  EXPECT_EQ(verdict.confidence, Confidence::kCertain);
  EXPECT_THAT(verdict.victims, ElementsAre(0, 1, 2));
}

TEST(Nodes, TimesOfAnotherClockBecomeOurs) {
  for (const int64_t behind : {int64_t{0}, 900 * kSec, -900 * kSec, int64_t{INT64_MAX / 2}}) {
    HangEvidence evidence = firstNode();
    HangEvidence other = secondNode(std::min(behind, kNow - 50 * kSec));
    other.ranks[1].gone_ns = other.now_ns - 7 * kSec;
    addNode(evidence, other, std::min(behind, kNow - 50 * kSec), 5);
    ASSERT_EQ(evidence.ranks.size(), 4u);
    EXPECT_EQ(evidence.ranks[2].tail.back().begin_ns, evidence.ranks[0].tail.back().begin_ns);
    EXPECT_EQ(evidence.ranks[2].tail.back().done_ns, 0u);
    EXPECT_EQ(evidence.ranks[2].heartbeat_age_ns, static_cast<uint64_t>(kStillSec * kSec));
    EXPECT_EQ(evidence.ranks[3].gone_ns, kNow - 7 * kSec);
    EXPECT_EQ(evidence.clock_error_ns, 5);
  }
}

TEST(Nodes, ProgressOfAnotherNodeIsProgress) {
  HangEvidence evidence = firstNode();
  HangEvidence other = secondNode(0);
  other.ranks[1].heartbeat_age_ns = 2 * kSec;
  addNode(evidence, other, 0, 0);
  EXPECT_EQ(decide(evidence).state, VerdictState::kSlow);
}

TEST(Nodes, ARankIsTakenOnce) {
  HangEvidence evidence = firstNode();
  HangEvidence other = firstNode();
  other.ranks[0].pid = 1;
  addNode(evidence, other, 0, 0);
  EXPECT_EQ(evidence.ranks.size(), 2u);
  EXPECT_EQ(evidence.ranks[0].pid, 1000);
}

TEST(Nodes, NobodyIsNamedWhereTheCulpritMayBeOnASilentNode) {
  HangEvidence evidence = firstNode();
  evidence.silent_nodes = {1};
  evidence.nodes_problem = "the rank that carries the request did not come back";
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.what, "elsewhere");
  EXPECT_EQ(verdict.state, VerdictState::kHang);
  EXPECT_THAT(verdict.culprits, IsEmpty());
  EXPECT_THAT(verdict.candidates, IsEmpty());
  EXPECT_THAT(verdictText(evidence, verdict),
              HasSubstr("node 1 does not answer: no evidence about its ranks"));
  EXPECT_THAT(verdictText(evidence, verdict), HasSubstr("did not come back"));
  EXPECT_THAT(verdict.advice, HasSubstr("check node 1"));
  const auto report = nlohmann::json::parse(hangReportJson(evidence, verdict));
  EXPECT_EQ(report["silent_nodes"], nlohmann::json({1}));
}

TEST(Nodes, ADeadRankIsNotNamedWhileANodeIsSilent) {
  HangEvidence evidence = firstNode();
  evidence.ranks[1].alive = false;
  evidence.ranks[1].gone_ns = kNow - kSec;
  evidence.ranks[1].tail.pop_back();
  evidence.silent_nodes = {1};
  Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.confidence, Confidence::kUndecidable);
  EXPECT_THAT(ranksOf(verdict.candidates), ElementsAre(1));
  evidence.silent_nodes.clear();
  addNode(evidence, secondNode(0), 0, 0);
  EXPECT_THAT(ranksOf(decide(evidence).culprits), ElementsAre(1));
}

TEST(Nodes, WhoWentFirstIsOpenIfClocksDifferByMore) {
  const auto gone = [](int64_t apart_ns, int64_t error_ns) {
    HangEvidence evidence = firstNode();
    HangEvidence other = secondNode(0);
    evidence.ranks[1].alive = other.ranks[1].alive = false;
    evidence.ranks[1].tail.pop_back();
    evidence.ranks[1].gone_ns = kNow - 5 * kSec;
    other.ranks[1].gone_ns = evidence.ranks[1].gone_ns + apart_ns;
    addNode(evidence, other, 0, error_ns);
    return decide(evidence);
  };
  EXPECT_THAT(ranksOf(gone(kSec, 0).culprits), ElementsAre(1));
  EXPECT_THAT(ranksOf(gone(kSec, kSec / 2).culprits), ElementsAre(1));
  EXPECT_THAT(ranksOf(gone(kSec, 2 * kSec).candidates), ElementsAre(1, 3));
  EXPECT_THAT(gone(kSec, 2 * kSec).culprits, IsEmpty());
}

TEST(Nodes, EvidenceTravelsWhole) {
  HangEvidence evidence = secondNode(0);
  evidence.ranks[0].children = {{77, "Z", "python"}};
  evidence.ranks[0].call_sites[1] = "train.py:12 step";
  evidence.ranks[1].cpu_share = 0.25;
  evidence.ranks[1].children_cpu_share = 1.5;
  evidence.ranks[1].callers = {{OpThread::of(0x7f0000000009, 0xFFFF), "S", "pipe_read"}};
  evidence.silent_nodes = {3, 4};
  const std::string text = evidenceJson(evidence);
  const auto read = evidenceFromJson(text);
  ASSERT_TRUE(read);
  EXPECT_EQ(evidenceJson(*read), text);
  EXPECT_EQ(hangReportJson(*read, decide(*read)), hangReportJson(evidence, decide(evidence)));
}

TEST(Nodes, EvidenceThatIsTooLongKeepsWhereRanksStand) {
  HangEvidence evidence = secondNode(0);
  std::string others;
  for (int thread = 0; thread < 200; ++thread) {
    others += "Thread 0x0000000000001" + std::to_string(thread + 100) +
              " (most recent call first):\n  File \"/x/" + std::string(200, 'x') +
              ".py\", line 3 in wait\n";
  }
  for (RankEvidence& rank : evidence.ranks) {
    rank.stacks = others + rank.stacks.text() +
                  "GIL held by 0x0000000000001150, awaited by 0x00007f0000000002\n" +
                  "Main thread 0x00007f0000000002\n";
    rank.tail = after(500, {op(OpKind::kAllreduce, 501, false)});
    rank.callers = {{OpThread::of(0x1151, 7), "S", ""}};
  }
  const auto read = evidenceFromJson(evidenceJson(evidence, 16 << 10));
  ASSERT_TRUE(read);
  ASSERT_EQ(read->ranks.size(), 2u);
  EXPECT_EQ(read->ranks[1].tail.back().seq, 501u);
  const Stacks stacks = read->ranks[1].stacks.parsed();
  ASSERT_EQ(stacks.threads.size(), 3u);
  EXPECT_TRUE(stacks.threads[0].holds_gil);
  EXPECT_EQ(stacks.threads[0].frames.front().function, "wait");
  EXPECT_EQ(standingOf(read->ranks[1]).stack->thread, stacks.threads[1].thread);
  EXPECT_TRUE(stacks.threads[2].main);
  EXPECT_EQ(stacks.threads[2].awaits_gil_of, stacks.threads[0].thread);
  EXPECT_EQ(stacks.threads[2].frames.front().function, "load_batch");
  EXPECT_LE(evidenceJson(evidence, 100).size(), evidenceJson(HangEvidence{}).size() + 100);
}

}  // namespace
}  // namespace reft
