#include "intercept/base/fault.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft {
namespace fault_test {

// Runs `body` in a child and returns its wait status; the child exits with 0 if nothing hit it.
int statusOf(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
  if (WIFSTOPPED(status)) {
    int end = 0;
    ::kill(child, SIGKILL);
    ::waitpid(child, &end, 0);
  }
  return status;
}

int statusOfPoint(const std::string& spec, int rank, FaultPoint point, int64_t step) {
  return statusOf([&] {
    configureFaults(spec, rank);
    faultPoint(point, step);
  });
}

TEST(Fault, ActionsDoWhatTheySay) {
  int status = statusOfPoint("0:3:mid_chunk:kill", 0, FaultPoint::mid_chunk, 3);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  status = statusOfPoint("0:3:mid_chunk:stop", 0, FaultPoint::mid_chunk, 3);
  EXPECT_TRUE(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
  status = statusOfPoint("0:3:mid_chunk:exit", 0, FaultPoint::mid_chunk, 3);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 17);
  status = statusOfPoint("0:3:mid_chunk:abort", 0, FaultPoint::mid_chunk, 3);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

TEST(Fault, OtherRanksStepsAndPointsAreSpared) {
  EXPECT_EQ(statusOfPoint("0:3:mid_chunk:kill", 1, FaultPoint::mid_chunk, 3), 0);
  EXPECT_EQ(statusOfPoint("0:3:mid_chunk:kill", 0, FaultPoint::mid_chunk, 2), 0);
  EXPECT_EQ(statusOfPoint("0:3:mid_chunk:kill", 0, FaultPoint::gate, 3), 0);
  EXPECT_EQ(statusOfPoint("", 0, FaultPoint::gate, 3), 0);
}

TEST(Fault, StarsAndSeveralRules) {
  EXPECT_NE(statusOfPoint("*:*:gate:exit", 5, FaultPoint::gate, 77), 0);
  EXPECT_NE(statusOfPoint("9:1:gate:exit;5:2:after_vote:exit;", 5, FaultPoint::after_vote, 2), 0);
}

TEST(Fault, ARuleFiresOnce) {
  // Continued after the stop, the child meets the point again and lives.
  const pid_t child = ::fork();
  if (child == 0) {
    configureFaults("0:*:gate:stop", 0);
    faultPoint(FaultPoint::gate, 1);
    faultPoint(FaultPoint::gate, 2);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFEXITED(status));
  if (!WIFEXITED(status)) {
    ::kill(child, SIGKILL);
  }
}

TEST(Fault, OnlyTheChosenAttemptIsHit) {
  const auto attempt = [](const char* wanted, const char* current) {
    return statusOf([&] {
      ::setenv("REFT_FAULT_ATTEMPT", wanted, 1);
      ::setenv("TORCHELASTIC_RESTART_COUNT", current, 1);
      configureFaults("0:*:gate:exit", 0);
      faultPoint(FaultPoint::gate, 1);
    });
  };
  EXPECT_NE(attempt("0", "0"), 0);
  EXPECT_EQ(attempt("0", "1"), 0);
  EXPECT_NE(attempt("1", "1"), 0);
}

TEST(Fault, MalformedSpecsAreRefused) {
  for (const char* spec :
       {"x", "0:1:gate", "0:1:nowhere:kill", "0:1:gate:explode", "0:1:gate:raise", "-1:1:gate:kill",
        "0:one:gate:kill", "0::gate:kill", "0:1:gate:kill:more"}) {
    EXPECT_THROW(configureFaults(spec, 0), InvalidArgument) << spec;
  }
  configureFaults("", 0);
}

}  // namespace fault_test
}  // namespace reft
