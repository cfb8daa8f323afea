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
