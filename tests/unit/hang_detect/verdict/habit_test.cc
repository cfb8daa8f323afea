// Histories of ranks that have repeated their steps, and one rank that departs from its own.
#include "hang_detect/verdict/habit.h"

#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/hang_detect/evidence/evidence_maker.h"

#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/report/report.h"

namespace reft {
namespace habit_test {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

constexpr OpKind kReduce = OpKind::kAllreduce;
constexpr OpKind kSend = OpKind::kSend;
constexpr OpKind kRecv = OpKind::kRecv;

// One rank's log: ops that are done, and at last one in which it is held.
class Log {
 public:
  Log(int rank, int world) : rank_(rankOf(rank, world, {})) {
    for (const char* name : {"a", "b"}) {
      rank_.groups.push_back(group(name, rank, world));
    }
    for (uint32_t line = 1; line < 10; ++line) {
      rank_.call_sites[line] = "/home/u/jobs/train.py:" + std::to_string(line) + " step";
    }
  }
  Log& does(OpKind kind, int peer_or_group, uint32_t line, bool done = true) {
    const bool message = kind == kSend || kind == kRecv;
    const auto in = message ? 0 : static_cast<uint32_t>(peer_or_group);
    OpEntry entry = op(kind, ++seq_[message ? 3 : in], done, message ? peer_or_group : -1, in);
    entry.call_site = line;
    rank_.tail.push_back(entry);
    ++rank_.ops_begun;
    return *this;
  }
  Log& held(OpKind kind, int peer_or_group, uint32_t line) {
    return does(kind, peer_or_group, line, false);
  }
  Log& step() {
    rank_.tail.push_back(op(OpKind::kStep, ++seq_[4], true));
    ++rank_.ops_begun;
    return *this;
  }
  // As the log is read: of all but the newest ops only the short form is left.
  RankEvidence evidence(size_t tail = 64) const {
    RankEvidence result = rank_;
    while (result.tail.size() > tail) {
      if (result.tail.front().kind != OpKind::kStep) {
        result.past.push_back(pastOf(result.tail.front()));
      }
      result.tail.erase(result.tail.begin());
    }
    return result;
  }

 private:
  RankEvidence rank_;
  uint32_t seq_[5] = {};
};

// Three ranks use groups a and b by turns; `wrong` takes b first at last, from the line `from`.
HangEvidence twoGroups(int rounds, int wrong, uint32_t from = 2) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 3; ++r) {
    Log log(r, 3);
    for (int round = 0; round < rounds; ++round) {
      log.does(kReduce, 1, 1).does(kReduce, 2, 2).step();
    }
    r == wrong ? log.held(kReduce, 2, from) : log.held(kReduce, 1, 1);
    ranks.push_back(log.evidence());
  }
  return job(ranks);
}

TEST(Habit, NamesWhoUsesTwoGroupsInAnotherOrderThanItHasAlwaysDone) {
  const HangEvidence evidence = twoGroups(40, 2);
  const Verdict verdict = decide(evidence);
  EXPECT_EQ(verdict.what, "cycle");
  EXPECT_EQ(verdict.confidence, Confidence::kLikely);
  ASSERT_EQ(ranksOf(verdict.culprits), std::vector<int>{2});
  EXPECT_THAT(verdict.culprits[0].text,
              HasSubstr("rank 2 departs from its habit: it calls all_reduce of group b at "
                        "jobs/train.py:2 step, where it has called all_reduce of group a at "
                        "jobs/train.py:1 step all "));
  // The same from the evidence that was written, whose older ops have a short form.
  EXPECT_FALSE(evidence.ranks[0].past.empty());
  const auto read = evidenceFromJson(hangReportJson(evidence, verdict));
  ASSERT_TRUE(read);
  EXPECT_TRUE(read->ranks[0].past == evidence.ranks[0].past);
  EXPECT_EQ(decide(*read).culprits.at(0).text, verdict.culprits[0].text);
}

TEST(Habit, DoesNotNameAnybodyAfterAFewRepetitions) {
  EXPECT_EQ(ranksOf(decide(twoGroups(8, 2)).culprits), std::vector<int>{2});
  const Verdict verdict = decide(twoGroups(4, 2));
  EXPECT_EQ(verdict.what, "cycle");
  EXPECT_EQ(verdict.confidence, Confidence::kUndecidable);
}

// An epoch is over, say, and the others have one batch more: who is wrong is not known.
TEST(Habit, AnOpThatIsNoPartOfItIsANewPhase) {
  EXPECT_EQ(decide(twoGroups(40, 2, /*from=*/9)).confidence, Confidence::kUndecidable);
}

TEST(Habit, DoesNotChooseAmongSeveralWhoLeaveTheirs) {
  HangEvidence evidence = twoGroups(40, 2);
  evidence.ranks[1].tail.back() = evidence.ranks[2].tail.back();
  EXPECT_EQ(decide(evidence).confidence, Confidence::kUndecidable);
}

// A pipeline of three stages with two micro-batches; the middle one leaves a send out.
HangEvidence pipeline(int steps, size_t micro_batches, size_t left_out) {
  Log first(0, 3), middle(1, 3), last(2, 3);
  for (int step = 0; step <= steps; ++step) {
    const bool wrong = step == steps;
    for (size_t batch = 0; batch < micro_batches; ++batch) {
      first.does(kSend, 1, 1);
      middle.does(kRecv, 0, 2);
      if (!wrong || batch != left_out) {
        middle.does(kSend, 2, 3);
        last.does(kRecv, 1, 4);
      }
    }
    if (wrong) {
      break;
    }
    for (size_t batch = 0; batch < micro_batches; ++batch) {
      last.does(kSend, 1, 5);
      middle.does(kRecv, 2, 6).does(kSend, 0, 7);
      first.does(kRecv, 1, 8);
    }
    for (Log* log : {&first, &middle, &last}) {
      log->step();
    }
  }
  first.held(kRecv, 1, 8);
  middle.held(kRecv, 2, 6);
  last.held(kRecv, 1, 4);
  return job({first.evidence(), middle.evidence(), last.evidence()});
}

TEST(Habit, NamesTheStageOfAPipelineThatLeavesASendOut) {
  for (const size_t left_out : {0U, 1U}) {
    const Verdict verdict = decide(pipeline(8, 2, left_out));
    EXPECT_EQ(verdict.what, "crossed_recvs");
    EXPECT_EQ(verdict.confidence, Confidence::kLikely);
    ASSERT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
    EXPECT_THAT(verdict.culprits[0].text, HasSubstr("where it has called send to 2 at jobs/"));
  }
}

// Six steps of 64 ops: the tail alone holds one of them.
TEST(Habit, ReachesBackBeyondTheTail) {
  HangEvidence evidence = pipeline(6, 16, 7);
  EXPECT_EQ(ranksOf(decide(evidence).culprits), std::vector<int>{1});
  for (RankEvidence& rank : evidence.ranks) {
    rank.past.clear();
  }
  EXPECT_EQ(decide(evidence).confidence, Confidence::kUndecidable);
}

TEST(Habit, NamesWhoReceivesFirstInASwap) {
  Log sends_first(0, 2), receives_first(1, 2);
  for (int step = 0; step < 40; ++step) {
    sends_first.does(kSend, 1, 1).does(kRecv, 1, 2).step();
    receives_first.does(kRecv, 0, 3).does(kSend, 0, 4).step();
  }
  sends_first.held(kRecv, 1, 2);
  receives_first.held(kRecv, 0, 3);
  const Verdict verdict = decide(job({sends_first.evidence(), receives_first.evidence()}));
  EXPECT_EQ(verdict.what, "crossed_recvs");
  EXPECT_EQ(verdict.confidence, Confidence::kLikely);
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{0});
}

TEST(Habit, OfOthersThatLeaveTheirsShowsANewPhase) {
  // Ranks 0 and 1 swap; rank 2 has left the loop as rank 0 has, and waits for both.
  Log zero(0, 3), one(1, 3), two(2, 3);
  for (int step = 0; step < 20; ++step) {
    zero.does(kSend, 1, 1).does(kReduce, 0, 5);
    one.does(kRecv, 0, 3).does(kReduce, 0, 5);
    two.does(kReduce, 1, 6).does(kReduce, 0, 5);
  }
  zero.held(kReduce, 0, 5);
  one.held(kRecv, 0, 3);
  HangEvidence evidence = job({zero.evidence(), one.evidence(), two.evidence()});
  evidence.ranks.back().tail.push_back(op(kReduce, 21, false));
  evidence.ranks.back().tail.back().call_site = 5;
  EXPECT_EQ(decide(evidence).confidence, Confidence::kUndecidable);
  evidence.ranks.back().tail.back() = op(kReduce, 21, false, -1, 1);
  evidence.ranks.back().tail.back().call_site = 6;
  EXPECT_EQ(ranksOf(decide(evidence).culprits), std::vector<int>{0});
}

PastOp past(uint32_t line) {
  PastOp result;
  result.kind = kReduce;
  result.call_site = line;
  return result;
}

std::vector<PastOp> pastOfLines(const std::vector<uint32_t>& lines) {
  std::vector<PastOp> result;
  for (const uint32_t line : lines) {
    result.push_back(past(line));
  }
  return result;
}

Habit habitAtTheEnd(std::vector<PastOp> done) {
  Departure left;
  return habitOf(done, done.size() - 1, left);
}

TEST(HabitOf, IsUnknownWhereDifferentOpsFollowByTurns) {
  // An evaluation now and then: neither it nor its absence departs from anything.
  std::vector<uint32_t> lines;
  for (int step = 0; step < 30; ++step) {
    lines.insert(lines.end(), {1, 2});
    if (step == 4 || step == 13 || step == 21 || step == 26) {
      lines.push_back(3);
    }
  }
  for (const uint32_t next : {1U, 3U}) {
    auto with = lines;
    with.push_back(next);
    EXPECT_EQ(habitAtTheEnd(pastOfLines(with)), Habit::kUnknown) << next;
  }
}

TEST(HabitOf, KnowsAPeriodThatIsLongerThanAStep) {
  std::vector<uint32_t> lines;
  for (int step = 1; step < 41; ++step) {
    lines.insert(lines.end(), {1, 2});
    if (step % 5 == 0) {
      lines.push_back(3);
    }
  }
  const std::pair<uint32_t, Habit> kNext[] = {{1, Habit::kKept}, {2, Habit::kLeft}};
  for (const auto& [next, habit] : kNext) {
    auto with = lines;
    with.push_back(next);
    EXPECT_EQ(habitAtTheEnd(pastOfLines(with)), habit) << next;
  }
}

TEST(HabitOf, ANewPhaseHasAHabitAfterSomeRepetitions) {
  for (const int rounds : {3, 8}) {
    std::vector<uint32_t> lines = {1, 1, 1, 1, 1, 1};
    for (int round = 0; round < rounds; ++round) {
      lines.insert(lines.end(), {2, 3});
    }
    const std::pair<uint32_t, Habit> kNext[] = {{2, Habit::kKept}, {3, Habit::kLeft}};
    for (const auto& [next, habit] : kNext) {
      auto with = pastOfLines(lines);
      with.push_back(past(next));
      Departure left;
      EXPECT_EQ(habitOf(with, 6, left), rounds == 3 ? Habit::kUnknown : habit) << next;
    }
  }
}

TEST(HabitOf, IsUnknownWithoutAPast) {
  Departure left;
  EXPECT_EQ(habitOf({}, 0, left), Habit::kUnknown);
  EXPECT_EQ(habitAtTheEnd(pastOfLines({1})), Habit::kUnknown);
  EXPECT_EQ(habitAtTheEnd(pastOfLines({1, 2, 1, 2, 2})), Habit::kUnknown);
}

}  // namespace habit_test
}  // namespace reft
