#include "hang_detect/unwind/native_stacks.h"

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hang_detect/unwind/thread_copy.h"
#include "hang_detect/unwind/unwinder.h"

// Seen from outside, so that their names are found.
extern "C" __attribute__((noinline)) int reft_test_inner(int pipe) {
  char byte = 0;
  const auto got = ::write(pipe, &byte, 1);
  ::raise(SIGSTOP);
  return static_cast<int>(got);
}

extern "C" __attribute__((noinline)) int reft_test_outer(int pipe) {
  return reft_test_inner(pipe) + 1;
}

namespace reft {
namespace native_stacks_test {

using ::testing::Contains;
using ::testing::HasSubstr;

// The thread sanitizer gives each forked child a thread of its own, so that the children here are
// not what they seem.
#if defined(__SANITIZE_THREAD__)
constexpr bool kForeignThreads = true;
#else
constexpr bool kForeignThreads = false;
#endif
#define SKIP_WITH_FOREIGN_THREADS() \
  if (kForeignThreads)              \
  GTEST_SKIP() << "the thread sanitizer has a thread in the child"

class StoppedChild {
 public:
  StoppedChild() {
    int ends[2];
    if (::pipe(ends) != 0) {
      return;
    }
    pid_ = ::fork();
    if (pid_ == 0) {
      ::_exit(reft_test_outer(ends[1]) == 0 ? 1 : 0);
    }
    ::waitpid(pid_, nullptr, WUNTRACED);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~StoppedChild() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  StoppedChild(const StoppedChild&) = delete;
  StoppedChild& operator=(const StoppedChild&) = delete;
  pid_t pid() const { return pid_; }
  std::string status(const std::string& field) const {
    return statusField(procPath(pid_, "status"), field);
  }
  // What it does once the kernel has put it back to where a tracer found it, which takes a moment
  // after the tracer let go.
  std::string settled() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::string state = status("State");
    while (state.rfind('R', 0) == 0 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
      state = status("State");
    }
    return state;
  }

 private:
  pid_t pid_ = -1;
};

std::vector<std::string> functionsOf(const MergedThread& thread) {
  std::vector<std::string> names;
  for (const MergedFrame& frame : thread.stack.frames) {
    names.push_back(frame.native.function);
  }
  return names;
}

TEST(NativeStacks, OfAStoppedProcessAreReadAndItStaysStopped) {
  SKIP_WITH_FOREIGN_THREADS();
  const StoppedChild child;
  const NativeStacks read = readNativeStacks(child.pid());
  EXPECT_THAT(child.settled(), HasSubstr("stopped"));
  EXPECT_EQ(child.status("TracerPid"), "0");
  EXPECT_THAT(read.python.error, HasSubstr("is no CPython"));
  if (!builtWithUnwinder()) {
    EXPECT_THAT(read.merged.error, HasSubstr("built without libunwind"));
    EXPECT_TRUE(read.merged.threads.empty());
    return;
  }
  if (read.merged.error.find("no right") != std::string::npos) {
    GTEST_SKIP() << read.merged.error;
  }
  EXPECT_EQ(read.merged.error, "");
  ASSERT_EQ(read.merged.threads.size(), 1u);
  EXPECT_TRUE(read.merged.threads[0].main);
  const auto names = functionsOf(read.merged.threads[0]);
  EXPECT_THAT(names, Contains("reft_test_inner"));
  EXPECT_THAT(names, Contains("reft_test_outer"));
  EXPECT_THAT(names, Contains("main"));
}

TEST(NativeStacks, OfNobodyAndOfTheEndedSaySo) {
  EXPECT_THAT(readNativeStacks(0).python.error, HasSubstr("there is no process"));
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::_exit(0);
  }
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
  const auto read = readNativeStacks(pid);
  EXPECT_TRUE(read.merged.threads.empty());
  EXPECT_NE(read.merged.error, "");
  ::waitpid(pid, nullptr, 0);
}

TEST(ThreadCopy, IsOfWhoIsHeldAndLetsGo) {
  SKIP_WITH_FOREIGN_THREADS();
  const StoppedChild child;
  int problem = 0;
  const auto maps = mapsOf(child.pid(), problem);
  ProcessMemory memory(child.pid());
  bool held = false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto copy = copyThread(child.pid(), child.pid(), memory, maps, deadline, [&] {
    held = true;
    EXPECT_NE(child.status("TracerPid"), "0");
  });
  if (copy.problem.find("no right") != std::string::npos) {
    GTEST_SKIP() << copy.problem;
  }
  EXPECT_TRUE(held);
  EXPECT_EQ(copy.problem, "");
  EXPECT_EQ(copy.state, "T");
  EXPECT_LE(copy.stack_begin, copy.registers.rsp);
  EXPECT_GT(copy.stack_begin + copy.stack.size(), copy.registers.rsp);
  EXPECT_EQ(child.status("TracerPid"), "0");
  EXPECT_EQ(tasksOf(child.pid()), std::vector<int>{child.pid()});
}

// Who waits for a vfork() is where no signal and no ptrace reaches.
TEST(NativeStacks, OfAThreadThatNothingInterruptsAreGivenUpAndItGoesOn) {
  SKIP_WITH_FOREIGN_THREADS();
  if (!builtWithUnwinder()) {
    GTEST_SKIP() << "built without libunwind";
  }
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setpgid(0, 0);
    if (::vfork() == 0) {
      for (;;) {
        ::pause();
      }
    }
    ::_exit(7);
  }
  ::setpgid(pid, pid);
  const std::string status = procPath(pid, "status");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (statusField(status, "State")[0] != 'D' && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  ASSERT_EQ(statusField(status, "State")[0], 'D');
  const auto read = readNativeStacks(pid, std::chrono::milliseconds(300));
  EXPECT_EQ(statusField(status, "TracerPid"), "0");
  int problem = 0;
  const std::string child =
      readProcText(procPath(pid, "task/" + std::to_string(pid) + "/children"), 64, problem);
  ASSERT_GT(std::atoi(child.c_str()), 0);
  ::kill(std::atoi(child.c_str()), SIGKILL);
  int end = 0;
  EXPECT_EQ(::waitpid(pid, &end, 0), pid);
  EXPECT_TRUE(WIFEXITED(end) && WEXITSTATUS(end) == 7);
  if (read.merged.error.find("no right") != std::string::npos) {
    GTEST_SKIP() << read.merged.error;
  }
  EXPECT_THAT(read.merged.error, HasSubstr("in the kernel, where nothing interrupts it"));
}

volatile sig_atomic_t* signals_seen = nullptr;

TEST(NativeStacks, OfAProcessThatGetsSignalsLoseNone) {
  SKIP_WITH_FOREIGN_THREADS();
  constexpr int kSignals = 500;
  void* const shared =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  signals_seen = static_cast<volatile sig_atomic_t*>(shared);
  const pid_t pid = ::fork();
  if (pid == 0) {
    struct sigaction action {};
    action.sa_handler = [](int) { *signals_seen = *signals_seen + 1; };
    ::sigaction(SIGRTMIN, &action, nullptr);
    signals_seen[1] = 1;
    for (;;) {
      ::pause();
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(90);
  const auto until = [deadline](auto condition) {
    while (!condition() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  };
  until([] { return signals_seen[1] == 1; });
  std::thread sender([pid] {
    for (int i = 0; i < kSignals; ++i) {
      ::sigqueue(pid, SIGRTMIN, sigval{});
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 10; ++i) {
    const auto read = readNativeStacks(pid);
    EXPECT_TRUE(!builtWithUnwinder() || read.merged.error.find("no right") != std::string::npos ||
                read.merged.threads.size() == 1);
  }
  sender.join();
  until([] { return *signals_seen == kSignals; });
  EXPECT_EQ(*signals_seen, kSignals);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ::munmap(shared, 4096);
}

}  // namespace native_stacks_test
}  // namespace reft
