#include "hang_detect/verdict/crash.h"

#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/hang_detect/evidence/evidence_maker.h"

#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"

namespace reft {
namespace crash_test {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000;

RankEvidence dead(int rank, int64_t after_ms) {
  RankEvidence end = rankOf(rank, 4, after(3));
  end.alive = end.answered = false;
  end.stacks = {};
  end.gone_ns = kNow + after_ms * kMs;
  return end;
}

RankEvidence raised(int rank, int64_t after_ms, const std::string& type, const std::string& text,
                    int64_t line = 88) {
  RankEvidence end = dead(rank, after_ms + 300);
  end.ending.exit_code = 1;
  end.ending.exception = Uncaught{};
  Uncaught& exception = *end.ending.exception;
  exception.type = type;
  exception.message = text;
  exception.at_ns = kNow + after_ms * kMs;
  exception.frames = {{"/x/site-packages/torch/nn/modules/module.py", 1500, "_call_impl"},
                      {"/home/u/train.py", line, "load_batch"},
                      {"/home/u/train.py", 120, "<module>"}};
  return end;
}

RankEvidence lostPeer(int rank, int64_t after_ms) {
  return raised(rank, after_ms, "RuntimeError",
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
                "peer [127.0.0.1]:33333");
}

RankEvidence signalled(int rank, int64_t after_ms, int signal) {
  RankEvidence end = dead(rank, after_ms);
  end.ending.signal = signal;
  return end;
}

RankEvidence clean(int rank, int64_t after_ms) {
  RankEvidence end = dead(rank, after_ms);
  end.said_bye = true;
  end.ending.exit_code = 0;
  return end;
}

TEST(Crash, NamesTheFirstThatFailedByItselfAndWhoEndedInConsequence) {
  const auto evidence = job({lostPeer(0, 80), raised(1, 0, "ValueError", "bad batch"),
                             signalled(2, 120, SIGTERM), lostPeer(3, 60)});
  const Verdict verdict = decideCrash(evidence);
  EXPECT_EQ(verdict.state, VerdictState::kCrash);
  EXPECT_EQ(verdict.what, "exception");
  EXPECT_EQ(verdict.confidence, Confidence::kCertain);
  EXPECT_EQ(verdict.remedy, Remedy::kFixProgram);
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  EXPECT_THAT(verdict.victims, ElementsAre(0, 2, 3));
  ASSERT_TRUE(verdict.culprits[0].frame);
  EXPECT_EQ(verdict.culprits[0].frame->line, 88);  // the program's own
  EXPECT_THAT(verdict.culprits[0].text, HasSubstr("rank 1 raised ValueError at train.py:88"));
  EXPECT_THAT(verdict.culprits[0].text, HasSubstr("bad batch"));
  const std::string screen = verdictText(evidence, verdict);
  EXPECT_THAT(screen, HasSubstr("crash, exception (certain)"));
  EXPECT_THAT(screen, HasSubstr("ended in consequence: ranks 0 2 3"));
  EXPECT_THAT(screen, HasSubstr("class: fix the program"));
}

// A rank that fails may take seconds to end, and others end before it.
TEST(Crash, WhenARankFailedCountsNotWhenItEnded) {
  RankEvidence slow = raised(2, 0, "ValueError", "bad");
  slow.gone_ns = kNow + 5000 * kMs;
  const Verdict verdict =
      decideCrash(job({raised(0, 900, "KeyError", "masks what it met", 12), slow}));
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{2});
  EXPECT_THAT(verdict.evidence, ::testing::Contains("rank 0 failed later, too"));
}

TEST(Crash, RanksThatFailAlikeAreNamedTogether) {
  const Verdict verdict = decideCrash(job(
      {raised(0, 0, "ValueError", "bad"), raised(1, 400, "ValueError", "bad"), lostPeer(2, 90)}));
  EXPECT_EQ(ranksOf(verdict.culprits), (std::vector<int>{0, 1}));
  // At another line it is another failure.
  const Verdict one =
      decideCrash(job({raised(0, 0, "ValueError", "bad"), raised(1, 400, "ValueError", "bad", 9)}));
  EXPECT_EQ(ranksOf(one.culprits), std::vector<int>{0});
}

TEST(Crash, WhatARankRaisedCountsNotThatItsLauncherHelpedItToItsEnd) {
  RankEvidence helped = raised(0, 5, "ValueError", "bad");
  helped.ending.exit_code = -1;
  helped.ending.signal = SIGTERM;
  const Verdict verdict = decideCrash(job({helped, raised(1, 0, "ValueError", "bad")}));
  EXPECT_EQ(ranksOf(verdict.culprits), (std::vector<int>{0, 1}));
}

// It may only hide what it met.
TEST(Crash, AnErrorOfItsOwnOnAnotherRankSoonAfterMakesItDoubtful) {
  const auto with = [](int64_t after_ms) {
    return decideCrash(job(
        {raised(0, 0, "ValueError", "bad"), raised(1, after_ms, "Strange", "training failed", 9)}));
  };
  EXPECT_EQ(ranksOf(with(30).culprits), std::vector<int>{0});
  EXPECT_EQ(with(30).confidence, Confidence::kLikely);
  EXPECT_EQ(with(3000).confidence, Confidence::kCertain);
}

// It says so before the other rank, whose exit only its agent notices, is known to be gone.
TEST(Crash, ARankThatHidesAFailedOpIsNotTheFirst) {
  RankEvidence hides = raised(0, 0, "Strange", "training failed");
  hides.tail.back().failed = true;
  RankEvidence killed = signalled(1, 4, SIGKILL);
  EXPECT_EQ(ranksOf(decideCrash(job({hides, killed})).culprits), std::vector<int>{1});
  // Unless no other failed by itself.
  EXPECT_EQ(ranksOf(decideCrash(job({hides, lostPeer(1, 4)})).culprits), std::vector<int>{0});
}

TEST(Crash, ARankThatWasTerminatedComesBeforeThoseThatHideWhatTheyMet) {
  RankEvidence hides = raised(0, 0, "Strange", "training failed");
  hides.tail.back().failed = true;
  const auto named = [&](int64_t after_ms) {
    return ranksOf(decideCrash(job({hides, signalled(1, after_ms, SIGTERM)})).culprits);
  };
  EXPECT_EQ(named(3), std::vector<int>{1});
  EXPECT_EQ(named(250), std::vector<int>{0});  // by the launcher, because rank 0 had ended
}

TEST(Crash, ProcessesThatAreKilledOneAfterTheOtherAreNamedTogether) {
  const Verdict verdict =
      decideCrash(job({signalled(0, 0, SIGKILL), signalled(1, 60, SIGKILL), lostPeer(2, 20)}));
  EXPECT_EQ(verdict.what, "killed");
  EXPECT_EQ(verdict.remedy, Remedy::kRetry);
  EXPECT_EQ(ranksOf(verdict.culprits), (std::vector<int>{0, 1}));
}

TEST(Crash, TheOomKillerIsNamed) {
  RankEvidence end = signalled(1, 0, SIGKILL);
  end.oom_kills = 1;
  const Verdict verdict = decideCrash(job({lostPeer(0, 10), end}));
  EXPECT_EQ(verdict.what, "oom_kill");
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  EXPECT_THAT(verdict.advice, HasSubstr("memory"));
}

TEST(Crash, ClassesOfExceptions) {
  const auto classOf = [](const std::string& type, const std::string& text, int number = 0) {
    RankEvidence end = raised(0, 0, type, text);
    end.ending.exception->error_number = number;
    return std::string(crashRuleFor(end).reason);
  };
  EXPECT_EQ(classOf("OSError", "[Errno 28] No space left on device", 28), "disk_full");
  EXPECT_EQ(classOf("OSError", "[Errno 5] Input/output error", 5), "disk");
  EXPECT_EQ(classOf("MemoryError", ""), "host_memory");
  EXPECT_EQ(classOf("torch.OutOfMemoryError", "CUDA out of memory."), "device_memory");
  EXPECT_EQ(classOf("torch.AcceleratorError", "CUDA error: an illegal memory access"), "device");
  EXPECT_EQ(classOf("RuntimeError", "DataLoader worker (pid 12) is killed by signal: Killed."),
            "data_worker");
  EXPECT_EQ(classOf("torch.distributed.DistBackendError", "x"), "communication");
  EXPECT_EQ(classOf("KeyboardInterrupt", ""), "interrupted");
  EXPECT_EQ(classOf("ValueError", "bad"), "exception");
}

TEST(Crash, WhatAnExceptionWasRaisedFromCountsToo) {
  RankEvidence end = raised(0, 0, "RuntimeError", "cannot save");
  end.ending.exception->causes = {"OSError: [Errno 28] No space left on device"};
  EXPECT_STREQ(crashRuleFor(end).reason, "disk_full");
  RankEvidence masked = raised(1, 50, "Strange", "training failed");
  masked.ending.exception->causes = {"RuntimeError: Connection closed by peer"};
  const Verdict verdict = decideCrash(job({end, masked}));
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{0});
  EXPECT_THAT(verdict.victims, ElementsAre(1));
}

TEST(Crash, ASignalHasItsPlace) {
  RankEvidence end = signalled(1, 5, SIGSEGV);
  end.ending.fault = FatalSignal{};
  FatalSignal& fault = *end.ending.fault;
  fault.signal = SIGSEGV;
  fault.thread = 0x7f0000000002;
  fault.main = true;
  fault.stacks = stackOf("  File \"/home/u/train.py\", line 7 in crash\n");
  fault.at_ns = kNow;
  const Verdict verdict = decideCrash(job({lostPeer(0, 3), end}));
  EXPECT_EQ(verdict.what, "signal");
  ASSERT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  ASSERT_TRUE(verdict.culprits[0].frame);
  EXPECT_EQ(verdict.culprits[0].frame->line, 7);
  EXPECT_THAT(verdict.culprits[0].text, HasSubstr("was ended by SIGSEGV at train.py:7 crash"));
}

RankEvidence endedByWatchdog(int rank, int64_t at_ns, const std::string& why) {
  RankEvidence end = signalled(rank, at_ns, SIGABRT);
  end.ending.fault = FatalSignal{};
  FatalSignal& fault = *end.ending.fault;
  fault.signal = SIGABRT;
  fault.at_ns = kNow + at_ns;
  fault.thrown = "c10::DistBackendError";
  fault.message = "[PG ID 0 PG GUID 0(default_pg) Rank " + std::to_string(rank) +
                  "] Process group watchdog thread terminated with exception: " + why +
                  "\nException raised from c10_cuda_check_implementation";
  return end;
}

TEST(Crash, WhatTheWatchdogOfNcclThrewSaysWhyItEndedTheRank) {
  RankEvidence lost = endedByWatchdog(1, 5, "CUDA error: an illegal memory access was encountered");
  lost.ending.fault->frames = {{"abort", "/usr/lib/libc.so.6", "0x4"},
                               {"", "/usr/lib/libstdc++.so.6", "0x3"},
                               {"", "/site/reft/lib/libreft.so", "0x9"},
                               {"std::terminate()", "/usr/lib/libstdc++.so.6", "0x5"},
                               {"run", "/site/torch/libtorch_cuda.so", "0x6"}};
  const Verdict verdict = decideCrash(job({lostPeer(0, 30), lost}));
  EXPECT_EQ(verdict.what, "device");
  ASSERT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  EXPECT_THAT(
      verdict.culprits[0].text,
      HasSubstr("was ended by SIGABRT for c10::DistBackendError: CUDA error: an illegal memory "
                "access was encountered, in run (libtorch_cuda.so+0x6), not in its main "
                "thread"));
  EXPECT_THAT(verdict.culprits[0].text, Not(HasSubstr("Exception raised from")));
}

TEST(Crash, ARankWhoseWatchdogTimedOutWaitedForAnother) {
  const RankEvidence waited =
      endedByWatchdog(0, 5,
                      "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
                      "OpType=ALLREDUCE) ran for 600029 milliseconds before timing out.");
  EXPECT_EQ(crashRuleFor(waited).reason, std::string("timeout"));
  EXPECT_EQ(crashRuleFor(waited).share, CrashRule::Share::kConsequence);
}

TEST(Crash, ASignalHasItsNativeFrameOutsideOfTheCLibrary) {
  RankEvidence end = signalled(1, 5, SIGABRT);
  end.ending.fault = FatalSignal{};
  FatalSignal& fault = *end.ending.fault;
  fault.signal = SIGABRT;
  fault.at_ns = kNow;
  fault.main = true;
  fault.frames = {{"raise", "/usr/lib/libc.so.6", "0x3"},
                  {"abort", "/usr/lib/libc.so.6", "0x4"},
                  {"check", "/home/u/ext.so", "0x5"},
                  {"step", "", "train.py:7"}};
  EXPECT_THAT(decideCrash(job({lostPeer(0, 3), end})).culprits.at(0).text,
              HasSubstr("was ended by SIGABRT, in check (ext.so+0x5)"));
  fault.frames.resize(2);
  EXPECT_THAT(decideCrash(job({lostPeer(0, 3), end})).culprits.at(0).text,
              HasSubstr("was ended by SIGABRT, in raise (libc.so.6+0x3)"));
}

TEST(Crash, ExitCodes) {
  RankEvidence end = dead(0, 0);
  end.ending.exit_code = 3;
  const Verdict verdict = decideCrash(job({end, lostPeer(1, 10)}));
  EXPECT_EQ(verdict.what, "exit_code");
  EXPECT_THAT(verdict.culprits.at(0).text, HasSubstr("exit code 3"));
}

TEST(Crash, ARankThatLeftCleanlyBeforeTheOthersFailedIsNamed) {
  // Its process took longer to end than the others did to notice.
  RankEvidence left = clean(1, 90);
  left.ending.left_ns = kNow + 20 * kMs;
  const Verdict verdict = decideCrash(job({lostPeer(0, 50), left, lostPeer(2, 60)}));
  EXPECT_EQ(verdict.what, "ended_early");
  EXPECT_EQ(verdict.confidence, Confidence::kLikely);
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
}

TEST(Crash, ARankThatLeftComesBeforeThoseThatTheLauncherEndedForIt) {
  const Verdict verdict =
      decideCrash(job({lostPeer(0, 50), clean(1, 0), signalled(2, 300, SIGTERM)}));
  EXPECT_EQ(verdict.what, "ended_early");
  EXPECT_EQ(ranksOf(verdict.culprits), std::vector<int>{1});
  // A rank that ends cleanly when all are terminated did nothing wrong.
  EXPECT_EQ(decideCrash(job({clean(0, 0), signalled(1, 5, SIGTERM)})).what, "terminated");
}

TEST(Crash, WhereAllSayThatAnotherFailedNobodyIsNamed) {
  auto evidence = job({lostPeer(0, 50), lostPeer(1, 60)});
  Verdict verdict = decideCrash(evidence);
  EXPECT_EQ(verdict.confidence, Confidence::kUndecidable);
  EXPECT_THAT(verdict.culprits, IsEmpty());
  EXPECT_EQ(ranksOf(verdict.candidates), (std::vector<int>{0, 1}));
  evidence.nodes = 2;
  verdict = decideCrash(evidence);
  EXPECT_THAT(verdict.advice, HasSubstr("other nodes"));
}

TEST(Crash, OtherNodesMayHaveFailedBefore) {
  auto evidence = job({raised(0, 0, "ValueError", "bad")});
  evidence.nodes = 2;
  EXPECT_EQ(decideCrash(evidence).confidence, Confidence::kLikely);
}

TEST(Crash, EndedFromOutside) {
  const Verdict all = decideCrash(job({signalled(0, 0, SIGTERM), signalled(1, 5, SIGTERM)}));
  EXPECT_EQ(all.what, "terminated");
  EXPECT_TRUE(all.outside);
  const Verdict one = decideCrash(job({signalled(0, 0, SIGTERM), lostPeer(1, 5)}));
  EXPECT_EQ(ranksOf(one.culprits), std::vector<int>{0});
  EXPECT_FALSE(one.outside);
}

// As a job of one node that has a fatal note.
HangEvidence withFatalNote(std::vector<RankEvidence> ranks) {
  HangEvidence evidence = job(std::move(ranks));
  evidence.hardware = {{0, false, "eth0: link went down once since the job began"},
                       {0, true, "GPU 1 fell off the bus (Xid 79)"}};
  return evidence;
}

TEST(Crash, HardwareThatFailedOnTheNodeOfTheFirstRankExcludesIt) {
  for (const RankEvidence& first :
       {raised(1, 0, "RuntimeError", "CUDA error: unspecified launch failure"),
        raised(1, 0, "AssertionError", "loss is nan"), signalled(1, 0, SIGABRT),
        signalled(1, 0, SIGKILL)}) {
    const HangEvidence evidence = withFatalNote({lostPeer(0, 80), first});
    const Verdict verdict = decideCrash(evidence);
    const Verdict without = decideCrash(job({lostPeer(0, 80), first}));
    EXPECT_EQ(verdict.remedy, Remedy::kExcludeNode);
    EXPECT_NE(without.remedy, Remedy::kExcludeNode);
    EXPECT_EQ(verdict.what, without.what);
    EXPECT_EQ(verdict.confidence, without.confidence);
    EXPECT_EQ(ranksOf(verdict.culprits), ranksOf(without.culprits));
    EXPECT_EQ(verdict.victims, without.victims);
    const std::string screen = verdictText(evidence, verdict);
    EXPECT_THAT(screen, HasSubstr("class: exclude node"));
    EXPECT_THAT(screen,
                HasSubstr("- GPU 1 fell off the bus (Xid 79)\n- eth0: link went down once"));
  }
}

TEST(Crash, HardwareThatFailedElsewhereChangesNoVerdict) {
  HangEvidence evidence = withFatalNote({raised(1, 0, "ValueError", "bad")});
  evidence.hardware[1].node = 5;
  EXPECT_EQ(decideCrash(evidence).remedy, Remedy::kFixProgram);
}

TEST(Crash, ANoteThatIsNotFatalChangesNoVerdict) {
  HangEvidence evidence = withFatalNote({raised(1, 0, "ValueError", "bad")});
  evidence.hardware.pop_back();
  const Verdict verdict = decideCrash(evidence);
  EXPECT_EQ(verdict.remedy, Remedy::kFixProgram);
  EXPECT_THAT(verdict.evidence, ::testing::Contains(HasSubstr("eth0: link went down")));
}

TEST(Crash, WhatHasAnotherReasonIsNotBlamedOnTheHardware) {
  for (const RankEvidence& end : {raised(1, 0, "OutOfMemoryError", "CUDA out of memory"),
                                  raised(1, 0, "MemoryError", ""), signalled(1, 0, SIGTERM)}) {
    EXPECT_NE(decideCrash(withFatalNote({end})).remedy, Remedy::kExcludeNode);
  }
}

TEST(Crash, NoRankIsNamedBecauseOfTheHardwareAlone) {
  const Verdict verdict = decideCrash(withFatalNote({lostPeer(0, 0), lostPeer(1, 5)}));
  EXPECT_EQ(verdict.confidence, Confidence::kUndecidable);
  EXPECT_THAT(verdict.culprits, IsEmpty());
  EXPECT_EQ(verdict.remedy, Remedy::kRetry);
  EXPECT_EQ(decideCrash(withFatalNote({rankOf(0, 2, after(3)), clean(1, 0)})).state,
            VerdictState::kHealthy);
}

TEST(Crash, NoneWhereAllLiveOrEndedCleanly) {
  const auto evidence = job({rankOf(0, 2, after(3)), clean(1, 0)});
  EXPECT_EQ(decideCrash(evidence).state, VerdictState::kHealthy);
}

TEST(Crash, AReportHoldsAllThatTheVerdictWasMadeFrom) {
  RankEvidence fault = signalled(2, 40, SIGSEGV);
  FatalSignal& signal = fault.ending.fault.emplace();
  signal.signal = SIGSEGV;
  signal.code = 1;
  signal.address = 0x10;
  signal.thread = 0x7f0000000002;
  signal.main = true;
  signal.tid = 12;
  signal.handler = "/site/reft/lib/libreft.so";
  signal.frames = {{"crash_here", "/home/u/ext.so", "0x1f"}, {"f", "", "a.py:7"}};
  signal.stacks = stackOf("  File \"/home/u/a.py\", line 7 in f\n");
  signal.at_ns = kNow;
  const auto evidence =
      job({lostPeer(0, 50), raised(1, 20, "ValueError", "bad"), fault, clean(3, 900)});
  const Verdict verdict = decideCrash(evidence);
  const std::string report = hangReportJson(evidence, verdict);
  const auto again = evidenceFromJson(report);
  ASSERT_TRUE(again);
  const Verdict repeated = decideCrash(*again);
  EXPECT_EQ(hangReportJson(*again, repeated), report);
  const std::string text = hangReportText(evidence, verdict);
  EXPECT_THAT(text, HasSubstr("uncaught, newest call first: ValueError: bad"));
  EXPECT_THAT(text,
              HasSubstr("SIGSEGV in thread 0x00007f0000000002 (main), address 0x10, newest frame"));
  EXPECT_THAT(text, HasSubstr("    crash_here (ext.so+0x1f)\n    a.py:7 f\n"));
  EXPECT_THAT(text, Not(HasSubstr("no progress")));
}

}  // namespace crash_test
}  // namespace reft
