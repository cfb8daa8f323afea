#include "hang_detect/evidence/ending.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "intercept/base/error.h"

namespace reft {
namespace ending_test {

using ::testing::ElementsAre;

// Waits until a child has ended, and leaves it for its parent to reap.
pid_t endedChild(void (*end)()) {
  const pid_t child = ::fork();
  if (child == 0) {
    end();
    ::_exit(99);
  }
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  return child;
}

TEST(Ending, TheExitStatusOfAProcessThatNobodyHasWaitedFor) {
  const pid_t left = endedChild([] { ::_exit(7); });
  Ending ending;
  addExitStatus(ending, exitStatusOf(left));
  EXPECT_EQ(ending.exit_code, 7);
  ::waitpid(left, nullptr, 0);
  EXPECT_EQ(exitStatusOf(left), -1);

  const pid_t killed = endedChild([] { ::raise(SIGKILL); });
  ending = {};
  addExitStatus(ending, exitStatusOf(killed));
  EXPECT_EQ(ending.signal, SIGKILL);
  EXPECT_EQ(ending.exit_code, -1);
  ::waitpid(killed, nullptr, 0);
}

TEST(Ending, OfALivingProcessThereIsNone) {
  EXPECT_EQ(exitStatusOf(::getpid()), -1);
  EXPECT_EQ(exitStatusOf(0), -1);
  EXPECT_EQ(exitStatusOf(-1), -1);
}

TEST(Ending, ReadsLastWords) {
  Ending ending;
  addLastWords(ending, R"({"kind": "exception", "type": "ValueError", "message": "bad", "errno": 28,
                           "frames": [{"file": "a.py", "line": 3, "function": "f"}, 4],
                           "causes": ["OSError: x", 5], "at_ns": 12, "thread": ""})");
  ASSERT_TRUE(ending.exception);
  EXPECT_EQ(ending.exception->type, "ValueError");
  EXPECT_EQ(ending.exception->error_number, 28);
  ASSERT_EQ(ending.exception->frames.size(), 1U);
  EXPECT_EQ(ending.exception->frames[0].line, 3);
  EXPECT_THAT(ending.exception->causes, ElementsAre("OSError: x"));
  addLastWords(ending, R"({"kind": "leaving", "at_ns": 15})");
  EXPECT_EQ(ending.left_ns, 15);
  addLastWords(ending, R"({"kind": "exit", "code": 1, "at_ns": 20})");
  EXPECT_EQ(ending.exit_code, 1);
  EXPECT_EQ(ending.failedNs(), 12);
  addLastWords(ending, R"({"kind": "signal", "signal": 11, "thread": 140000000000000, "main": 1})");
  ASSERT_TRUE(ending.fault);
  EXPECT_EQ(ending.fault->thread, 140000000000000U);
  EXPECT_EQ(ending.fault->thrown, "");
}

TEST(Ending, KeepsTheExceptionThatNothingCaught) {
  FatalSignal fault;
  fault.signal = SIGABRT;
  fault.thrown = "c10::Error";
  fault.message = std::string(5000, 'x');
  Ending ending;
  ending.fault = fault;
  const Ending read = endingOf(endingFields(ending));
  ASSERT_TRUE(read.fault);
  EXPECT_EQ(read.fault->thrown, "c10::Error");
  EXPECT_EQ(read.fault->message.size(), 4096U);
}

// As reft-unwind prints them.
constexpr const char* kRead = R"({"native": {"threads": [
    {"tid": 5, "frames": [{"kind": "native", "function": "other", "object": "/a.so", "offset": "0x1"}]},
    {"tid": 7, "frames": [
        {"kind": "native", "function": "__poll", "object": "/usr/lib/libc.so.6", "offset": "0x5"},
        {"kind": "native", "function": "onFault", "object": "/site/reft/lib/libreft.so", "offset": "0x6"},
        {"kind": "native", "function": "", "object": "/usr/lib/libc.so.6", "offset": "0x7"},
        {"kind": "native", "function": "crash_here", "object": "/home/u/ext.so", "offset": "0x1f"},
        4,
        {"kind": "native", "function": "", "object": "/site/reft/lib/libreft.so", "offset": "0x2f"},
        {"kind": "python", "function": "step", "file": "/home/u/train.py", "line": 3}]}]}})";

TEST(Ending, NativeFramesBeginBehindTheHandler) {
  Ending ending;
  addLastWords(ending, R"({"kind": "signal", "signal": 11, "tid": 7, "at_ns": 4,
                           "handler": "/other/place/libreft.so"})");
  ASSERT_TRUE(ending.fault);
  addNativeFrames(*ending.fault, kRead);
  EXPECT_EQ(framesText(*ending.fault),
            "  crash_here (ext.so+0x1f)\n  libreft.so+0x2f\n  train.py:3 step\n");
  // The rank says it again, with its stacks: the frames stay. Another fault has its own.
  addLastWords(ending, R"({"kind": "signal", "signal": 11, "tid": 7, "at_ns": 4})");
  EXPECT_EQ(ending.fault->frames.size(), 3U);
  const Ending again = endingOf(endingFields(ending));
  EXPECT_EQ(framesText(*again.fault), framesText(*ending.fault));
  EXPECT_EQ(again.fault->tid, 7);
  addLastWords(ending, R"({"kind": "signal", "signal": 11, "tid": 7, "at_ns": 5})");
  EXPECT_TRUE(ending.fault->frames.empty());
}

TEST(Ending, WithoutTheHandlerAllNativeFramesStay) {
  FatalSignal fault;
  fault.tid = 7;
  fault.handler = "/site/other.so";
  addNativeFrames(fault, kRead);
  EXPECT_EQ(fault.frames.size(), 6U);
}

TEST(Ending, WhatReadersAnswerElseAddsNoFrames) {
  for (const char* answer :
       {"", "4", "[]", "{}", R"({"native": 4})", R"({"native": {"threads": 4}})",
        R"({"native": {"threads": [4, {}, {"tid": 7}, {"tid": 7, "frames": 4}]}})", "{\"native"}) {
    FatalSignal fault;
    fault.tid = 7;
    addNativeFrames(fault, answer);
    EXPECT_TRUE(fault.frames.empty()) << answer;
  }
  FatalSignal unknown;  // no thread is its thread
  addNativeFrames(unknown, R"({"native": {"threads": [{"frames": [{"kind": "native"}]}]}})");
  EXPECT_TRUE(unknown.frames.empty());
}

TEST(Ending, WhatIsNoLastWordsIsRefused) {
  Ending ending;
  for (const char* payload : {"", "[]", "{}", "{\"kind\": 3}", "{\"kind\": \"x\"}", "{\"kind\":"}) {
    EXPECT_THROW(addLastWords(ending, payload), InvalidArgument) << payload;
  }
  EXPECT_THROW(addLastWords(ending, std::string(kMostLastWords + 1, ' ')), InvalidArgument);
  EXPECT_TRUE(ending.empty());
}

TEST(Ending, LongTextsAreCut) {
  Ending ending;
  const std::string longest(20'000, 'x');
  addLastWords(ending, nlohmann::json{{"kind", "exception"},
                                      {"type", longest},
                                      {"message", longest},
                                      {"causes", std::vector<std::string>(20, longest)}}
                           .dump());
  EXPECT_LE(ending.exception->message.size(), 4096U);
  EXPECT_LE(ending.exception->type.size(), 512U);
  EXPECT_LE(ending.exception->causes.size(), 8U);
}

TEST(Ending, SignalsHaveNames) {
  EXPECT_EQ(signalName(SIGSEGV), "SIGSEGV");
  EXPECT_EQ(signalName(63), "signal 63");
}

}  // namespace ending_test
}  // namespace reft
