// The investigation without an agent: inputs at chosen times, and the actions that come out.
#include "agent/hang/investigation.h"

#include <deque>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"

namespace reft::agent {
namespace investigation_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kTick = kSecond / 4;
constexpr int64_t kStart = 1000 * kSecond;
constexpr double kSuspectSec = 4;

// One node of two ranks; rank 1 holds up rank 0, which is in an op. Ranks answer at once, unless
// silenced; the other nodes answer as told.
class InvestigationTest : public ::testing::Test {
 protected:
  struct TestClock final : Clock {
    int64_t nowNs() const override { return now_ns; }
    int64_t now_ns = kStart;
  };

  void SetUp() override { make({}); }

  void make(Investigation::Settings settings) {
    settings.job = "job";
    settings.suspect_sec = kSuspectSec;
    investigation = std::make_unique<Investigation>(settings);
    for (int rank = 0; rank < 2; ++rank) {
      logs[rank] = std::make_unique<OpLog>(nullptr, 256, clock);
      logs[rank]->addGroup("default", rank, 2);
      facts.ranks[rank] = {rank, 100 + rank, connectionOf(rank), kRun, true, false};
    }
    facts.incarnation = kRun;
    facts.world = 2;
  }

  static uint64_t connectionOf(int rank) { return static_cast<uint64_t>(rank) + 1; }

  uint64_t begin(int rank, OpKind kind = OpKind::kAllreduce) {
    OpLog::Op op;
    op.kind = kind;
    op.seq = ++seq[rank];
    op.peer = -1;
    op.bytes = 4;
    op.dtype = 6;
    const auto ticket = logs[rank]->begin(op);
    logs[rank]->markEnqueued(ticket);
    logs[rank]->markWaitBegin(ticket);
    return ticket;
  }

  // Rank 1 may keep a processor busy; no rank reads or writes.
  ProcessCounters countersOf(int rank) const { return {rank == 1 && busy ? clock.now_ns : 0, 0}; }

  // Both ranks do so many ops together.
  void train(int ops) {
    for (int i = 0; i < ops; ++i) {
      const uint64_t tickets[] = {begin(0), begin(1)};
      clock.now_ns += kTick / 5;
      for (int rank = 0; rank < 2; ++rank) {
        logs[rank]->markWaitEnd(tickets[rank]);
        logs[rank]->markDone(tickets[rank]);
      }
    }
  }

  void know() { investigation->know(facts); }

  // Ticks for so long.
  void pass(double seconds) {
    const auto end = clock.now_ns + static_cast<int64_t>(seconds * 1e9);
    while (clock.now_ns < end) {
      clock.now_ns += kTick;
      tick();
    }
  }

  void tick() {
    know();
    std::deque<OpLogReader> readers;
    std::vector<Investigation::RankLog> views;
    for (const auto& [rank, log] : logs) {
      if (facts.ranks[rank].live()) {
        readers.emplace_back(log->area(), log->areaBytes());
        views.push_back({rank, &readers.back(), true});
      }
    }
    investigation->tick(views, traced, clock.now_ns);
    execute();
    step();
  }

  void step() {
    know();
    investigation->advance(clock.now_ns);
    execute();
    investigation->advance(clock.now_ns);  // the answers to what advance() asked for
    execute();
  }

  void end(int rank) {
    facts.ranks[rank].alive = false;
    facts.ranks[rank].connection = 0;
    know();
    investigation->ended(rank, false, examined(rank), clock.now_ns);
    execute();
    step();
  }

  // Of exit code 1, after an exception of a class; "": it says that its peer is gone.
  void fail(int rank, const std::string& type) {
    Ending& ending = endings[rank];
    ending.exit_code = 1;
    ending.exception.emplace();
    ending.exception->type = type.empty() ? "RuntimeError" : type;
    ending.exception->message = type.empty() ? "Connection closed by peer" : "bad";
    ending.exception->at_ns = clock.now_ns;
    end(rank);
  }

  // The launcher has started all ranks again.
  void restart() {
    ++facts.incarnation;
    for (auto& [rank, known] : facts.ranks) {
      known = {rank, 100 + rank, connectionOf(rank), facts.incarnation, true, false};
      endings[rank] = {};
    }
    step();
  }

  void execute() {
    for (auto actions = investigation->takeActions(); !actions.empty();
         actions = investigation->takeActions()) {
      for (const auto& action : actions) {
        std::visit([this](const auto& kind) { execute(kind); }, action);
      }
    }
  }
  void execute(const action::Sample& action) {
    std::vector<ProcessSample> samples;
    for (const int rank : action.ranks) {
      samples.push_back({rank, countersOf(rank), false, {}});
    }
    investigation->sampled(action.look, samples, clock.now_ns);
  }
  void execute(const action::ReadHardware&) { ++hardware_reads; }
  void execute(const action::Count&) {
    investigation->counted({{0, countersOf(0)}, {1, countersOf(1)}}, clock.now_ns);
  }
  void execute(const action::AskForStacks& action) {
    for (const auto connection : action.connections) {
      asked.push_back(connection);
      if (answer_stacks) {
        investigation->replied(action.look, static_cast<int>(connection) - 1,
                               R"({"text": "", "error": ""})");
      }
    }
  }
  void execute(const action::ReadOutside& action) {
    outside.insert(outside.end(), action.pids.begin(), action.pids.end());
    for (const int pid : action.pids) {
      investigation->readOutside(action.look, pid, {"", "3.11", ""});
    }
  }
  RankEvidence examined(int rank) {
    RankEvidence entry;
    entry.rank = rank;
    entry.pid = 100 + rank;
    entry.alive = facts.ranks[rank].alive;
    entry.said_bye = facts.ranks[rank].said_bye;
    entry.proc_state = entry.alive ? (rank == 1 && stopped ? "T" : "S") : "";
    entry.ending = endings[rank];
    addOpLog(entry, logs[rank]->area(), logs[rank]->areaBytes(), clock.now_ns);
    return entry;
  }
  void execute(const action::Examine& action) {
    std::vector<RankEvidence> evidence;
    for (const int rank : action.ranks) {
      evidence.push_back(examined(rank));
    }
    ++examinations;
    investigation->examined(action.look, std::move(evidence), clock.now_ns);
  }
  void execute(const action::AskNodes& action) {
    requests.push_back(action.kind);
    if (action.kind == NodeRequest::kEvidence) {
      investigation->gathering(action.look, carrier, clock.now_ns);
      Gathered end;
      end.id = action.look;
      end.end = true;
      investigation->gathered(carrier, end, clock.now_ns);
    }
  }
  void execute(const action::AnswerNode& action) { node_answers.push_back(action); }
  void execute(const action::AnswerTool& action) { tool_answers.push_back(action); }
  void execute(const action::WriteReport& action) {
    reports.push_back(action);
    investigation->written(action, "/report", true, clock.now_ns);
  }
  void execute(const action::Show& action) { shown.push_back(action); }
  void execute(const action::ShowAtLauncher& action) { at_launcher.push_back(action); }
  void execute(const action::EndLauncher&) { ++ended_launchers; }
  void execute(const action::Abort& action) { aborts.push_back(action); }

  static constexpr uint64_t kRun = 7;
  TestClock clock;
  std::unique_ptr<Investigation> investigation;
  NodeFacts facts;
  std::map<int, std::unique_ptr<OpLog>> logs;
  std::map<int, Ending> endings;
  std::map<int, uint32_t> seq;
  bool answer_stacks = true, stopped = true, traced = false, busy = false;
  uint64_t carrier = 1;
  int examinations = 0;
  int hardware_reads = 0;
  int ended_launchers = 0;
  std::vector<uint64_t> asked;
  std::vector<int> outside;
  std::vector<NodeRequest> requests;
  std::vector<action::AnswerNode> node_answers;
  std::vector<action::AnswerTool> tool_answers;
  std::vector<action::WriteReport> reports;
  std::vector<action::Show> shown;
  std::vector<action::Abort> aborts;
  std::vector<action::ShowAtLauncher> at_launcher;
};

TEST_F(InvestigationTest, ReportsAHangOnceAnEpisode) {
  const auto ticket = begin(0);
  pass(kSuspectSec - 0.5);
  EXPECT_THAT(reports, IsEmpty());
  pass(1);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].finding.state, VerdictState::kHang);
  EXPECT_THAT(reports[0].finding.summary, HasSubstr("stopped 1"));
  ASSERT_EQ(shown.size(), 1U);
  EXPECT_EQ(shown[0].connection, connectionOf(0));
  EXPECT_THAT(shown[0].text, HasSubstr("/report.txt"));
  pass(20 * kSuspectSec);
  EXPECT_EQ(reports.size(), 1U);
  EXPECT_EQ(investigation->hangReports(), 1U);
  // Progress, and then another hang.
  logs[0]->markWaitEnd(ticket);
  logs[0]->markDone(ticket);
  begin(0);
  pass(kSuspectSec + 1);
  EXPECT_EQ(reports.size(), 2U);
}

// An evaluation of 40 s on one rank, say: at a place where the others have often waited.
TEST_F(InvestigationTest, ShowsABusyRankAsSlowOnceAnEpisodeAndReportsAHangOnlyMuchLater) {
  Investigation::Settings settings;
  settings.abort_on_hang = true;
  make(settings);
  stopped = false;
  busy = true;
  for (size_t episode = 1; episode <= 2; ++episode) {
    train(5);
    const auto ticket = begin(0);
    pass(kSuspectSec + 1);
    ASSERT_EQ(shown.size(), episode);
    EXPECT_EQ(shown.back().connection, connectionOf(0));
    EXPECT_THAT(shown.back().text, AllOf(HasSubstr("slow, busy"), HasSubstr("culprit: rank 1 ")));
    pass(8 * kSuspectSec);
    EXPECT_EQ(shown.size(), episode);
    EXPECT_THAT(reports, IsEmpty());
    EXPECT_THAT(aborts, IsEmpty());
    if (episode == 1) {  // rank 1 comes
      const auto other = begin(1);
      for (const auto& [rank, done] : {std::pair{0, ticket}, std::pair{1, other}}) {
        logs[rank]->markWaitEnd(done);
        logs[rank]->markDone(done);
      }
    }
  }
  pass(3 * kSuspectSec);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_THAT(reports[0].finding.summary, HasSubstr("busy 1"));
  EXPECT_EQ(aborts.size(), 1U);
}

TEST_F(InvestigationTest, TellsAToolThatARankIsBusyOnceItCanKnow) {
  busy = true;
  stopped = false;
  train(5);
  begin(0);
  // What ranks have used so far is noted after half of the suspicion time.
  for (const char* what : {"user_code", "busy"}) {
    pass(kSuspectSec * 3 / 8);
    know();
    investigation->toolAsks(50, {}, clock.now_ns);
    execute();
    step();
    EXPECT_THAT(tool_answers.back().json, HasSubstr(std::string("\"class\":\"") + what + "\""));
  }
}

TEST_F(InvestigationTest, ReportsAnIdleRankAtAKnownPlaceAtOnce) {
  stopped = false;
  train(5);
  begin(0);
  pass(kSuspectSec + 1);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_THAT(reports[0].finding.summary, HasSubstr("user_code 1"));
}

TEST_F(InvestigationTest, LeavesRanksThatMakeProgressAlone) {
  for (int i = 0; i < 40; ++i) {
    const auto ticket = begin(0);
    pass(kSuspectSec / 3);
    logs[0]->markWaitEnd(ticket);
    logs[0]->markDone(ticket);
  }
  EXPECT_THAT(asked, IsEmpty());
  EXPECT_EQ(examinations, 0);
}

TEST_F(InvestigationTest, ReadsRanksThatDoNotAnswerFromOutside) {
  begin(0);
  answer_stacks = false;
  pass(kSuspectSec + 1);
  EXPECT_THAT(outside, IsEmpty());
  EXPECT_THAT(reports, IsEmpty());
  pass(1.5);
  EXPECT_THAT(outside, ElementsAre(100, 101));
  EXPECT_EQ(reports.size(), 1U);
}

TEST_F(InvestigationTest, DiscardsALookAtRanksThatWereStartedAgain) {
  begin(0);
  answer_stacks = false;
  pass(kSuspectSec + 0.5);
  EXPECT_FALSE(asked.empty());
  facts.incarnation = kRun + 1;
  pass(3);
  EXPECT_THAT(reports, IsEmpty());
}

TEST_F(InvestigationTest, LooksTwiceAfterACrashAndReportsADisagreementOnly) {
  end(1);
  EXPECT_EQ(examinations, 1);
  pass(0.5);
  EXPECT_EQ(examinations, 2);
  EXPECT_THAT(reports, IsEmpty());
  EXPECT_THAT(asked, IsEmpty());
  pass(2);  // the launcher has not ended the others: a death to report, if they wait
  EXPECT_FALSE(asked.empty());
}

TEST_F(InvestigationTest, ShowsTheNextIncarnationWhyTheLastOneEnded) {
  know();
  facts.ranks[1].alive = false;
  know();
  investigation->ended(1, true, examined(1), clock.now_ns);
  execute();
  investigation->voted(0);  // of the same incarnation
  execute();
  EXPECT_THAT(shown, IsEmpty());
  facts.ranks[0].incarnation = facts.incarnation = kRun + 1;
  know();
  investigation->voted(0);
  investigation->voted(0);
  execute();
  ASSERT_EQ(shown.size(), 1U);
  EXPECT_THAT(shown[0].text, HasSubstr("OOM killer"));
}

TEST_F(InvestigationTest, EndsRanksAfterASecondLookThatFindsTheSame) {
  Investigation::Settings settings;
  settings.abort_on_hang = true;
  make(settings);
  begin(0);
  pass(kSuspectSec + 0.5);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_TRUE(investigation->wantsTracers(clock.now_ns));
  EXPECT_THAT(aborts, IsEmpty());
  pass(kSuspectSec);
  ASSERT_EQ(aborts.size(), 1U);
  EXPECT_EQ(aborts[0].incarnation, kRun);
  EXPECT_EQ(aborts[0].speaker, connectionOf(0));
  pass(20 * kSuspectSec);
  EXPECT_EQ(aborts.size(), 1U);
}

TEST_F(InvestigationTest, EndsNoRanksThatSomebodyDebugs) {
  Investigation::Settings settings;
  settings.abort_on_hang = true;
  make(settings);
  begin(0);
  traced = true;
  pass(50 * kSuspectSec);
  EXPECT_EQ(reports.size(), 1U);
  EXPECT_THAT(aborts, IsEmpty());
}

TEST_F(InvestigationTest, OfTheFirstNodeAsksTheOthersAndAnnouncesThatItLeads) {
  facts.nodes = 2;
  facts.world = 4;
  begin(0);
  pass(kSuspectSec + 0.5);
  ASSERT_FALSE(requests.empty());
  EXPECT_EQ(requests[0], NodeRequest::kEvidence);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_THAT(reports[0].evidence.silent_nodes, ElementsAre(1));
  EXPECT_EQ(std::count(requests.begin(), requests.end(), NodeRequest::kHold), 1);
  pass(60);
  EXPECT_GT(std::count(requests.begin(), requests.end(), NodeRequest::kHold), 5);
}

TEST_F(InvestigationTest, OfAnotherNodeDoesNothingWhileTheFirstLeads) {
  Investigation::Settings settings;
  settings.node = 1;
  make(settings);
  facts.nodes = 2;
  facts.world = 4;
  begin(0);
  for (int i = 0; i < 40; ++i) {
    know();
    investigation->nodeAsks(1, {static_cast<uint64_t>(i) + 1, 0, NodeRequest::kHold}, clock.now_ns);
    pass(kSuspectSec / 2);
  }
  EXPECT_THAT(requests, IsEmpty());
  EXPECT_THAT(reports, IsEmpty());
  pass(10 * kSuspectSec);  // without an announcement it asks, and then leads itself
  ASSERT_GE(requests.size(), 2U);
  EXPECT_EQ(requests[0], NodeRequest::kPlease);
  EXPECT_EQ(requests[1], NodeRequest::kEvidence);
  EXPECT_EQ(reports.size(), 1U);
}

TEST_F(InvestigationTest, AnswersEachCarrierOfAnotherNode) {
  facts.nodes = 2;
  know();
  investigation->nodeAsks(1, {5, 1, NodeRequest::kEvidence}, clock.now_ns);
  investigation->nodeAsks(2, {5, 1, NodeRequest::kEvidence}, clock.now_ns);
  execute();
  step();
  ASSERT_EQ(node_answers.size(), 1U);
  EXPECT_EQ(node_answers[0].request, 5U);
  EXPECT_THAT(node_answers[0].connections, ElementsAre(1, 2));
  EXPECT_EQ(node_answers[0].evidence.ranks.size(), 2U);
}

TEST_F(InvestigationTest, AnswersToolsUpToALimit) {
  know();
  answer_stacks = false;
  for (size_t i = 0; i < Investigation::kMaxLooks; ++i) {
    investigation->toolAsks(50, {1}, clock.now_ns);
  }
  EXPECT_THROW(investigation->toolAsks(50, {1}, clock.now_ns), InvalidArgument);
  execute();
  pass(3);
  EXPECT_EQ(tool_answers.size(), Investigation::kMaxLooks);
  EXPECT_EQ(tool_answers[0].connection, 50U);
  EXPECT_THAT(tool_answers[0].json, HasSubstr("\"rank\""));
  EXPECT_THAT(reports, IsEmpty());
}

// ---- ends

TEST_F(InvestigationTest, NamesTheRankThatFailedFirstOnceAllHaveEnded) {
  fail(1, "ValueError");
  EXPECT_THAT(reports, IsEmpty());
  clock.now_ns += kTick;
  fail(0, "");
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_TRUE(reports[0].ends);
  EXPECT_EQ(reports[0].finding.state, VerdictState::kCrash);
  EXPECT_THAT(reports[0].finding.summary, HasSubstr("exception 1"));
  ASSERT_EQ(at_launcher.size(), 1U);
  EXPECT_EQ(at_launcher[0].connection, 0U);  // no rank is left
  EXPECT_THAT(at_launcher[0].text, HasSubstr("failed first: rank 1 raised ValueError"));
  EXPECT_EQ(investigation->crashReports(), 1U);
  EXPECT_EQ(investigation->hangReports(), 0U);
}

TEST_F(InvestigationTest, DoesNotWaitForRanksThatDoNotEnd) {
  fail(1, "ValueError");
  pass(1);
  EXPECT_THAT(reports, IsEmpty());
  pass(0.5);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_TRUE(reports[0].ends);
  ASSERT_EQ(at_launcher.size(), 1U);
  EXPECT_EQ(at_launcher[0].connection,
            connectionOf(0));  // if the launcher's terminal takes nothing
}

TEST_F(InvestigationTest, TellsTheNextAttemptWhyTheOneBeforeEnded) {
  fail(1, "ValueError");
  fail(0, "");
  restart();
  know();
  investigation->voted(0);
  execute();
  ASSERT_EQ(shown.size(), 1U);
  EXPECT_THAT(shown[0].text, HasSubstr("why the previous ranks ended:"));
  EXPECT_THAT(shown[0].text, HasSubstr("rank 1 raised ValueError"));
}

TEST_F(InvestigationTest, DoesNotRepeatWhatTheLaunchersTerminalHasShown) {
  fail(1, "ValueError");
  fail(0, "");
  investigation->shown();
  restart();
  know();
  investigation->voted(0);
  execute();
  EXPECT_THAT(shown, IsEmpty());
}

TEST_F(InvestigationTest, AnAttemptThatBeginsAtOnceDoesNotHideTheEndOfTheOneBefore) {
  fail(1, "ValueError");
  restart();  // the end of rank 0 was never noticed
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].incarnation, kRun);
}

TEST_F(InvestigationTest, SaysThatTheSameFailureComesAgainAtTheSameStep) {
  for (int attempt = 1; attempt <= 3; ++attempt) {
    fail(1, attempt < 3 ? "ValueError" : "KeyError");
    fail(0, "");
    ASSERT_EQ(reports.size(), static_cast<size_t>(attempt));
    const bool again = reports.back().finding.screen.find("another start") != std::string::npos;
    EXPECT_EQ(again, attempt == 2) << reports.back().finding.screen;
    restart();
  }
}

TEST_F(InvestigationTest, EndsTheLauncherAfterAsManyLikeFailuresAsTheSettingSays) {
  Investigation::Settings settings;
  settings.crash_loop_limit = 2;
  make(settings);
  facts.restarts = true;
  for (const char* exception : {"ValueError", "KeyError", "KeyError"}) {
    EXPECT_EQ(ended_launchers, 0);
    fail(1, exception);
    fail(0, "");
    restart();
  }
  EXPECT_EQ(ended_launchers, 1);
  ASSERT_EQ(at_launcher.size(), 3U);
  EXPECT_THAT(at_launcher[1].text, Not(HasSubstr("now:")));
  EXPECT_THAT(at_launcher[2].text,
              HasSubstr("now: the launcher is ended, as REFT_CRASH_LOOP_LIMIT=2"));
}

TEST_F(InvestigationTest, EndsNoLauncherThatWouldNotStartAgainNorOneOfAJobThatAPersonEnds) {
  Investigation::Settings settings;
  settings.crash_loop_limit = 1;
  make(settings);
  fail(1, "ValueError");
  fail(0, "");
  restart();
  facts.restarts = true;
  fail(1, "KeyboardInterrupt");
  fail(0, "KeyboardInterrupt");
  EXPECT_EQ(reports.size(), 2U);
  EXPECT_EQ(ended_launchers, 0);
}

TEST_F(InvestigationTest, WaitsForTheHardwareCountersOfACrashForAMoment) {
  facts.gpus = facts.sampling = true;
  fail(1, "RuntimeError");
  fail(0, "");
  EXPECT_EQ(hardware_reads, 1);
  EXPECT_THAT(reports, IsEmpty());
  facts.sampling = false;
  facts.hardware = {{0, true, "GPU 1 fell off the bus"}};
  step();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_THAT(reports[0].finding.screen, HasSubstr("class: exclude node"));
  EXPECT_THAT(reports[0].finding.screen, HasSubstr("GPU 1 fell off the bus"));
}

TEST_F(InvestigationTest, DoesNotWaitForHardwareCountersThatDoNotCome) {
  facts.gpus = facts.sampling = true;
  fail(1, "RuntimeError");
  fail(0, "");
  pass(0.5);
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_THAT(reports[0].finding.screen, HasSubstr("class: fix the program"));
}

TEST_F(InvestigationTest, DoesNotWaitForHardwareCountersWithoutAGpu) {
  facts.sampling = true;
  fail(1, "ValueError");
  fail(0, "");
  EXPECT_EQ(reports.size(), 1U);
}

TEST_F(InvestigationTest, ReportsAHangWithTheHardwareCountersThatItWaitedFor) {
  begin(0);
  pass(kSuspectSec / 4);
  EXPECT_EQ(hardware_reads, 0);
  pass(kSuspectSec / 2);
  EXPECT_EQ(hardware_reads, 1) << "halfway";
  facts.sampling = true;
  pass(kSuspectSec / 4 + 0.5);
  EXPECT_EQ(hardware_reads, 2);
  EXPECT_THAT(reports, IsEmpty());
  facts.sampling = false;
  facts.hardware = {{0, false, "eth0: link went down once since the job began"}};
  step();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_THAT(reports[0].finding.screen,
              HasSubstr("eth0: link went down once since the job began"));
  EXPECT_EQ(reports[0].evidence.hardware.size(), 1U);
}

TEST_F(InvestigationTest, ReportsAHangWithoutHardwareCountersThatDoNotCome) {
  begin(0);
  facts.sampling = true;
  pass(kSuspectSec + 3);
  EXPECT_EQ(reports.size(), 1U);
}

TEST_F(InvestigationTest, AJobThatEndsCleanlyHasNoCrash) {
  for (const int rank : {0, 1}) {
    facts.ranks[rank].said_bye = true;
    end(rank);
  }
  pass(3);
  EXPECT_THAT(reports, IsEmpty());
  EXPECT_THAT(at_launcher, IsEmpty());
}

TEST_F(InvestigationTest, ShowsNothingWhenAPersonEndsTheJob) {
  for (const int rank : {0, 1}) {
    fail(rank, "KeyboardInterrupt");
  }
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_TRUE(reports[0].quiet);
  EXPECT_THAT(at_launcher, IsEmpty());
  EXPECT_THAT(shown, IsEmpty());
}

}  // namespace investigation_test
}  // namespace reft::agent
