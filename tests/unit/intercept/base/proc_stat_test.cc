#include "intercept/base/proc_stat.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

namespace reft {
namespace proc_stat_test {

TEST(ProcStat, ReadsNameStateParentFaultsAndProcessorTime) {
  const auto stat =
      parseProcStat("42 (python3) S 7 42 42 0 -1 4194304 100 5 6 0 11 22 33 44 20 0 3 0 900\n");
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->name(), "python3");
  EXPECT_EQ(stat->state, 'S');
  EXPECT_EQ(stat->parent, 7);
  EXPECT_EQ(stat->cpu_ticks, 110);
  EXPECT_EQ(stat->major_faults, 6);
  EXPECT_EQ(stat->start_ticks, 900);
}

TEST(ProcStat, NameMayHoldBlanksAndParentheses) {
  const auto stat = parseProcStat("42 (a) R 1 (b) T 9 42 42 0 -1 0 0 0 0 0 1 2 3 4 20\n");
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->name(), "a) R 1 (b");
  EXPECT_EQ(stat->state, 'T');
  EXPECT_EQ(stat->parent, 9);
}

TEST(ProcStat, ShortLinesGiveWhatTheyHold) {
  const auto stat = parseProcStat("42 (x) Z 9 1 2");
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->state, 'Z');
  EXPECT_EQ(stat->cpu_ticks, -1);
  EXPECT_EQ(stat->start_ticks, -1);
  EXPECT_EQ(parseProcStat("42 (x) Z")->state, 'Z');
}

TEST(ProcStat, LinesThatCannotBeUnderstoodGiveNothing) {
  for (const char* line : {"", "42", "42 (x", "42 x)", ")(", "42 (x)", "42 (x) "}) {
    EXPECT_FALSE(parseProcStat(line)) << line;
  }
}

TEST(ProcStat, LongNamesAreCut) {
  const auto stat = parseProcStat("42 (" + std::string(300, 'n') + ") R 1");
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->name(), std::string(64, 'n'));
  EXPECT_EQ(stat->state, 'R');
}

TEST(ProcStat, ReadsThisProcessItsThreadAndAZombie) {
  const auto own = procStat(::getpid());
  ASSERT_TRUE(own);
  EXPECT_EQ(own->parent, ::getppid());
  EXPECT_GE(own->cpu_ticks, 0);
  const auto thread = threadStat(::getpid(), static_cast<int>(::syscall(SYS_gettid)));
  ASSERT_TRUE(thread);
  EXPECT_EQ(thread->state, 'R');
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(0);
  }
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  const auto zombie = procStat(child);
  ASSERT_TRUE(zombie);
  EXPECT_EQ(zombie->state, 'Z');
  EXPECT_EQ(zombie->parent, ::getpid());
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(procStat(child));
}

}  // namespace proc_stat_test
}  // namespace reft
