#include "hang_detect/evidence/process_state.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft {
namespace {

using testing::IsEmpty;

// A child that makes a child and says so through a pipe; both live until they are ended.
struct Family {
  int child = -1;
  int grandchild = -1;
};

Family startFamily() {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  Family family;
  family.child = ::fork();
  if (family.child == 0) {
    const int own = ::fork();
    if (own == 0) {
      ::pause();
      ::_exit(0);
    }
    (void)!::write(ends[1], &own, sizeof(own));
    ::pause();
    ::_exit(0);
  }
  EXPECT_EQ(::read(ends[0], &family.grandchild, sizeof(int)), static_cast<ssize_t>(sizeof(int)));
  ::close(ends[0]);
  ::close(ends[1]);
  return family;
}

void end(const Family& family) {
  ::kill(family.grandchild, SIGKILL);
  ::kill(family.child, SIGKILL);
  ::waitpid(family.child, nullptr, 0);
}

TEST(Descendants, AreThoseOfAnyThreadAndTheirs) {
  Family family;
  std::vector<int> seen;
  std::vector<int> of_main;
  // A child is listed under the thread that forked it, while that thread lives.
  std::thread([&] {
    family = startFamily();
    seen = descendantsOf(::getpid());
    of_main = childrenOf(::getpid());
  }).join();
  end(family);
  EXPECT_THAT(seen, testing::ElementsAre(family.child, family.grandchild));
  EXPECT_THAT(of_main, IsEmpty());
}

TEST(Descendants, OfNobodyAreNone) {
  EXPECT_THAT(descendantsOf(0), IsEmpty());
  EXPECT_THAT(descendantsOf(::getpid()), IsEmpty());
}

TEST(Counters, HaveTheTimeOfALivingChildUntilItsParentHasIt) {
  const ProcessCounters before = processCounters(::getpid());
  const int child = ::fork();
  if (child == 0) {
    for (;;) {
    }
  }
  ProcessCounters now;
  do {
    now = processCounters(::getpid());
  } while (now.descendants_cpu_ns - before.descendants_cpu_ns < 50'000'000);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const ProcessCounters after = processCounters(::getpid());
  EXPECT_EQ(after.descendants_cpu_ns, 0);
  EXPECT_GE(after.cpu_ns - before.cpu_ns, 50'000'000);
}

}  // namespace
}  // namespace reft
