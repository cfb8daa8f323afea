#include "hang_detect/rank/thrown.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

namespace reft {
namespace thrown_test {

constexpr int kAsExpected = 7;

// Of a child: what std::terminate() leads to does not come back.
int statusOf(void (*end)()) {
  const pid_t child = ::fork();
  if (child == 0) {
    end();
    std::_Exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST(Thrown, KeepsWhatAThreadEndedTheProcessWith) {
  const int status = statusOf([] {
    std::set_terminate([] {  // the handler that was there before
      const Thrown found = thrown();
      std::_Exit(found.type == "std::out_of_range" && found.message == "row 7" ? kAsExpected : 1);
    });
    keepThrown();
    keepThrown();
    std::thread([] { throw std::out_of_range("row 7"); }).join();
  });
  EXPECT_EQ(WEXITSTATUS(status), kAsExpected);
}

TEST(Thrown, AnExceptionOfAnotherKindHasNoMessage) {
  const int status = statusOf([] {
    std::set_terminate([] {
      const Thrown found = thrown();
      std::_Exit(found.type == "int" && found.message.empty() ? kAsExpected : 1);
    });
    keepThrown();
    std::thread([] { throw 3; }).join();
  });
  EXPECT_EQ(WEXITSTATUS(status), kAsExpected);
}

TEST(Thrown, TheProcessEndsAsItWouldHave) {
  const int status = statusOf([] {
    keepThrown();
    std::terminate();
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGABRT);
  EXPECT_EQ(thrown().type, "");
}

}  // namespace thrown_test
}  // namespace reft
