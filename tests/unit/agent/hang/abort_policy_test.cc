#include "agent/hang/abort_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "intercept/base/clock.h"

namespace reft::agent {
namespace abort_policy_test {

using Act = AbortPolicy::Act;
using ::testing::HasSubstr;

constexpr int64_t kSuspect = 4 * kSecond;
constexpr uint64_t kRun = 7;  // incarnation

Finding hang() {
  Finding report{};
  report.state = VerdictState::kHang;
  report.confidence = Confidence::kCertain;
  report.summary = "user_code 2 train.py:12";
  return report;
}

Finding undecided() {
  Finding report = hang();
  report.confidence = Confidence::kUndecidable;
  report.summary = "cycle";
  return report;
}

// A report 5 s after the newest mark; ticks say how long after that mark they come.
class AbortPolicyTest : public ::testing::Test {
 protected:
  std::string report(const Finding& report) { return policy.reported(report, kRun, 5 * kSecond); }
  Act at(int64_t second, bool debugged = false, uint64_t incarnation = kRun) {
    return policy.tick(second * kSecond, second * kSecond, incarnation, debugged);
  }
  AbortPolicy policy{true, kSuspect};
};

TEST_F(AbortPolicyTest, EndsRanksWhenASecondLookFindsTheSame) {
  EXPECT_THAT(report(hang()), HasSubstr("within 2 s, the ranks end"));
  EXPECT_EQ(at(6), Act::kNothing);
  EXPECT_EQ(at(7), Act::kLookAgain);
  EXPECT_EQ(at(8), Act::kNothing);  // the answers are under way
  policy.lookedAgain(hang());
  EXPECT_EQ(at(9), Act::kAbort);
  EXPECT_THAT(policy.why(), HasSubstr("certain"));
  EXPECT_EQ(policy.incarnation(), kRun);
  EXPECT_EQ(at(10), Act::kNothing);  // once
}

TEST_F(AbortPolicyTest, ASecondLookThatFindsSomethingElseLeavesTheCap) {
  Finding elsewhere = hang(), busy = hang(), slow = hang();
  elsewhere.summary = "user_code 2 train.py:13";
  busy.at_work = true;
  slow.state = VerdictState::kSlow;
  for (const Finding& second : {elsewhere, busy, slow, undecided()}) {
    report(hang());
    EXPECT_EQ(at(7), Act::kLookAgain);
    policy.lookedAgain(second);
    EXPECT_EQ(at(39), Act::kNothing);
    EXPECT_EQ(at(40), Act::kAbort);
  }
}

TEST_F(AbortPolicyTest, WhatIsUndecidableOrAtWorkWaitsForTheCap) {
  Finding busy = hang();
  busy.at_work = true;
  for (const Finding& first : {undecided(), busy}) {
    EXPECT_THAT(report(first), HasSubstr("for 40 s, the ranks end"));
    EXPECT_EQ(at(39), Act::kNothing);
    EXPECT_EQ(at(40), Act::kAbort);
    EXPECT_THAT(policy.why(), HasSubstr("nothing has moved for 40 s"));
  }
}

TEST_F(AbortPolicyTest, NothingIsEndedUnderADebuggerNorSoonAfter) {
  report(hang());
  EXPECT_EQ(at(7, true), Act::kNothing);
  EXPECT_EQ(at(500, true), Act::kNothing);  // the cap has passed long ago
  EXPECT_EQ(at(503), Act::kNothing);
  EXPECT_EQ(at(504), Act::kAbort);
}

TEST_F(AbortPolicyTest, ADebuggerThatComesAfterTheSecondLookIsRespectedToo) {
  report(hang());
  EXPECT_EQ(at(7), Act::kLookAgain);
  policy.lookedAgain(hang());
  EXPECT_EQ(at(8, true), Act::kNothing);
  EXPECT_EQ(at(11), Act::kNothing);
  EXPECT_EQ(at(12), Act::kLookAgain);
}

TEST_F(AbortPolicyTest, APromptIsNeverTakenAway) {
  Finding prompt = hang();
  prompt.prompt = true;
  EXPECT_THAT(report(prompt), HasSubstr("do not end"));
  EXPECT_EQ(at(400), Act::kNothing);
  report(hang());
  EXPECT_EQ(at(7), Act::kLookAgain);
  policy.lookedAgain(prompt);
  EXPECT_EQ(at(400), Act::kNothing);
}

TEST_F(AbortPolicyTest, ProgressEndsTheMatter) {
  report(hang());
  EXPECT_EQ(policy.tick(7 * kSecond, 0, kRun, false), Act::kNothing);
  EXPECT_EQ(at(400), Act::kNothing);
}

TEST_F(AbortPolicyTest, NewRanksAreNotEndedForOldOnes) {
  report(hang());
  EXPECT_EQ(at(7), Act::kLookAgain);
  policy.lookedAgain(hang());
  EXPECT_EQ(at(8, false, kRun + 1), Act::kNothing);
  EXPECT_EQ(at(400), Act::kNothing);
}

TEST_F(AbortPolicyTest, WhatHappensOnOtherNodesIsSeenByALookAtTheCap) {
  Finding far = undecided(), traced = undecided(), moving = undecided();
  far.nodes = traced.nodes = moving.nodes = 2;
  traced.traced = true;
  moving.state = VerdictState::kSlow;
  for (const Finding& second : {traced, moving}) {
    report(far);
    EXPECT_EQ(at(39), Act::kNothing);
    EXPECT_EQ(at(40), Act::kLookAgain);
    EXPECT_EQ(at(41), Act::kNothing);
    policy.lookedAgain(second);
    EXPECT_EQ(at(42), Act::kNothing);
    EXPECT_EQ(at(45), Act::kNothing);
    EXPECT_EQ(at(46), Act::kLookAgain);
    policy.lookedAgain(far);
    EXPECT_EQ(at(47), Act::kAbort);
  }
}

TEST_F(AbortPolicyTest, ALauncherHasItsTimeToEndWhatADeadRankLeft) {
  Finding dead = hang();
  dead.somebody_died = true;
  report(dead);
  EXPECT_EQ(at(39), Act::kNothing);
  EXPECT_EQ(at(40), Act::kAbort);  // the cap of this setting, and the launcher's 35 s, have passed
}

TEST_F(AbortPolicyTest, ASecondHangIsLookedAtAnew) {
  report(hang());
  EXPECT_EQ(at(7), Act::kLookAgain);
  policy.reported(undecided(), kRun + 1, 20 * kSecond);
  policy.lookedAgain(hang());  // late, and about the first
  EXPECT_EQ(policy.tick(30 * kSecond, 10 * kSecond, kRun + 1, false), Act::kNothing);
  EXPECT_EQ(policy.tick(60 * kSecond, 40 * kSecond, kRun + 1, false), Act::kAbort);
  EXPECT_EQ(policy.incarnation(), kRun + 1);
}

TEST(AbortPolicy, DoesNothingUnlessItIsAskedFor) {
  AbortPolicy policy(false, kSuspect);
  EXPECT_EQ(policy.reported(hang(), kRun, 5 * kSecond), "");
  EXPECT_EQ(policy.tick(400 * kSecond, 400 * kSecond, kRun, false), Act::kNothing);
}

}  // namespace abort_policy_test
}  // namespace reft::agent
