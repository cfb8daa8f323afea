#include "agent/hang/launcher_terminal.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "intercept/base/unique_fd.h"

namespace reft::agent {
namespace launcher_terminal_test {

// A process whose error output is `file`; it lives until the test ends.
class Launcher {
 public:
  explicit Launcher(int file) : pid_(::fork()) {
    if (pid_ == 0) {
      ::dup2(file, 2);
      ::pause();
      ::_exit(0);
    }
    pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    // Until it has the file as its error output.
    const std::string path = "/proc/" + std::to_string(pid_) + "/fd/2";
    struct Name {
      std::array<char, 256> text{};
    } now, wanted;
    const std::string own = "/proc/self/fd/" + std::to_string(file);
    [[maybe_unused]] ssize_t length = ::readlink(own.c_str(), wanted.text.data(), 255);
    do {
      now = {};
      length = ::readlink(path.c_str(), now.text.data(), 255);
    } while (now.text != wanted.text);
  }
  ~Launcher() { end(); }

  void end() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
      ended_ = pid_;
      pid_ = -1;
    }
  }
  int pid() const { return pid_ > 0 ? pid_ : ended_; }
  const UniqueFd& pidfd() const { return pidfd_; }

 private:
  pid_t pid_, ended_ = -1;
  UniqueFd pidfd_;
};

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0) {
      read.reset(ends[0]);
      write.reset(ends[1]);
    }
  }
  std::string text() const {
    std::array<char, 4096> bytes{};
    const ssize_t got = ::read(read.get(), bytes.data(), bytes.size());
    return {bytes.data(), got > 0 ? static_cast<size_t>(got) : 0};
  }
  UniqueFd read, write;
};

UniqueFd fileOf(int flags) {
  char path[] = "/tmp/reft-launcher-XXXXXX";
  const UniqueFd made(::mkstemp(path));
  UniqueFd file(::open(path, O_RDWR | O_CLOEXEC | flags));
  ::unlink(path);
  return file;
}

TEST(LauncherTerminal, WritesToAPipe) {
  const Pipe pipe;
  Launcher launcher(pipe.write.get());
  EXPECT_TRUE(writeToStderrOf(launcher.pid(), launcher.pidfd(), "why\n"));
  EXPECT_EQ(pipe.text(), "why\n");
}

TEST(LauncherTerminal, AFullPipeDoesNotBlock) {
  const Pipe pipe;
  Launcher launcher(pipe.write.get());
  const std::string page(4096, 'x');
  while (::write(pipe.write.get(), page.data(), page.size()) > 0) {
  }
  EXPECT_FALSE(writeToStderrOf(launcher.pid(), launcher.pidfd(), "why\n"));
}

TEST(LauncherTerminal, WritesToAFileOnlyIfTheLauncherAppends) {
  for (const bool appends : {true, false}) {
    const UniqueFd file = fileOf(appends ? O_APPEND : 0);
    Launcher launcher(file.get());
    EXPECT_EQ(writeToStderrOf(launcher.pid(), launcher.pidfd(), "why\n"), appends);
    EXPECT_EQ(::lseek(file.get(), 0, SEEK_END), appends ? 4 : 0);
  }
}

TEST(LauncherTerminal, ALauncherThatHasEndedGetsNothing) {
  const Pipe pipe;
  Launcher launcher(pipe.write.get());
  launcher.end();
  EXPECT_FALSE(writeToStderrOf(launcher.pid(), launcher.pidfd(), "why\n"));
  EXPECT_EQ(pipe.text(), "");
}

}  // namespace launcher_terminal_test
}  // namespace reft::agent
