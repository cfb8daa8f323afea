#include "agent/hang/hang_watch.h"

#include <gtest/gtest.h>

#include "hang_detect/verdict/verdict.h"

namespace reft::agent {
namespace hang_watch_test {

TEST(HangWatch, ReportsOnceWhenEveryRankStandsStillWithAPendingOp) {
  HangWatch watch(100);
  std::map<int, Progress> live{{0, {5, 1000, true}}, {1, {5, 950, false}}};
  EXPECT_FALSE(watch.suspect(live, 1099));
  EXPECT_TRUE(watch.suspect(live, 1100));
  EXPECT_FALSE(watch.suspect(live, 1199));
  EXPECT_TRUE(watch.suspect(live, 1200));  // no hang so far: a later look may find one
  watch.reported();
  EXPECT_FALSE(watch.suspect(live, 5000));
}

TEST(HangWatch, LooksAgainAfterAReportAsOftenAsItIsTold) {
  HangWatch watch(100);
  std::map<int, Progress> live{{0, {5, 1000, true}}};
  EXPECT_TRUE(watch.suspect(live, 1100));
  watch.reported(2);
  EXPECT_FALSE(watch.suspect(live, 1199));
  EXPECT_TRUE(watch.suspect(live, 1200));
  EXPECT_TRUE(watch.suspect(live, 1300));
  EXPECT_FALSE(watch.suspect(live, 5000));
  watch.reported(2);
  live[0].heartbeat_ns = 5100;
  EXPECT_FALSE(watch.suspect(live, 5150));
  EXPECT_TRUE(watch.suspect(live, 5200));  // another hang
  watch.reported();
  EXPECT_FALSE(watch.suspect(live, 5300));
}

TEST(HangWatch, WhatTheAgentHasNotSeenIsNotHeldAgainstTheRanks) {
  HangWatch watch(100, 10);
  const std::map<int, Progress> waiting{{0, {1, 1000, true}}};
  for (int64_t now = 1000; now <= 1050; now += 10) {
    watch.look(now);
    EXPECT_FALSE(watch.suspect(waiting, now));
  }
  // The machine was suspended for 500: ranks have to be given the rest of their time.
  for (int64_t now = 1550; now < 1600; now += 10) {
    watch.look(now);
    EXPECT_FALSE(watch.suspect(waiting, now)) << now;
  }
  watch.look(1600);
  EXPECT_TRUE(watch.suspect(waiting, 1600));
  watch.reported();
  EXPECT_EQ(watch.awayNs(), 500);
  EXPECT_EQ(watch.reportedStillNs(1600), 100);
}

TEST(HangWatch, IsHalfwayOnceAnEpisode) {
  HangWatch watch(100);
  EXPECT_FALSE(watch.halfway(5000));
  std::map<int, Progress> live{{0, {5, 1000, true}}};
  watch.suspect(live, 1010);
  EXPECT_FALSE(watch.halfway(1049));
  EXPECT_TRUE(watch.halfway(1050));
  EXPECT_FALSE(watch.halfway(1060));
  live[0].heartbeat_ns = 1070;
  watch.suspect(live, 1080);
  EXPECT_TRUE(watch.halfway(1130));
}

Finding reportOf(VerdictState state, bool excused, bool could_come) {
  Finding report{};
  report.state = state;
  report.excused = excused;
  report.could_come = could_come;
  return report;
}

TEST(HangWatch, WhoHasJustBeenAtWorkIsGivenOneMoreLook) {
  const Finding works = reportOf(VerdictState::kSlow, true, true),
                hangs = reportOf(VerdictState::kHang, false, true);
  HangWatch watch(100);
  watch.suspect({{0, {5, 1000, true}}}, 1100);
  EXPECT_FALSE(watch.credible(works));
  EXPECT_FALSE(watch.credible(hangs));  // it may be on its way to the op
  EXPECT_TRUE(watch.credible(hangs));
  EXPECT_FALSE(watch.credible(works));
  EXPECT_TRUE(
      watch.credible(reportOf(VerdictState::kHang, false, false)));  // as one that is stopped
  EXPECT_FALSE(watch.credible(works));
  EXPECT_TRUE(watch.credible(reportOf(VerdictState::kHang, true, true)));  // at work for too long
  watch.suspect({{0, {6, 1300, true}}}, 1310);                             // another episode
  EXPECT_TRUE(watch.credible(hangs));
}

TEST(HangWatch, LooksEarlyForWhoIsAtWork) {
  HangWatch watch(100);
  watch.suspect({{0, {5, 1000, true}}}, 1010);
  EXPECT_FALSE(watch.early(1074));
  EXPECT_TRUE(watch.early(1075));
  EXPECT_FALSE(watch.early(1080));
  Verdict works;
  works.at_work = works.could_come = true;
  watch.lookedEarly(works);
  EXPECT_FALSE(watch.credible(reportOf(VerdictState::kHang, false, true)));
  watch.suspect({{0, {6, 1300, false}}}, 1310);  // idle ranks are not looked at
  EXPECT_FALSE(watch.early(1390));
}

TEST(HangWatch, ProgressStartsANewEpisode) {
  HangWatch watch(100);
  std::map<int, Progress> live{{0, {5, 1000, true}}};
  EXPECT_TRUE(watch.suspect(live, 1200));
  live[0].heartbeat_ns = 1300;
  EXPECT_FALSE(watch.suspect(live, 1310));
  EXPECT_TRUE(watch.suspect(live, 1400));
}

TEST(HangWatch, OneRankThatMovesIsProgressOfTheNode) {
  HangWatch watch(100);
  const std::map<int, Progress> live{{0, {5, 1000, true}}, {1, {9, 1950, true}}};
  EXPECT_FALSE(watch.suspect(live, 2000));
}

TEST(HangWatch, IdleRanksAreNotHung) {
  HangWatch watch(100);
  EXPECT_FALSE(watch.suspect({}, 5000));
  EXPECT_FALSE(watch.suspect({{0, {5, 1000, false}}}, 5000));
  EXPECT_FALSE(watch.suspect({{0, {0, 0, true}}}, 5000));
}

}  // namespace hang_watch_test
}  // namespace reft::agent
