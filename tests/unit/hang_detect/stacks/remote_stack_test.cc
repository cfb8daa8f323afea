#include "hang_detect/stacks/remote_stack.h"

#include <csignal>
#include <cstring>
#include <fstream>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hang_detect/stacks/elf_symbols.h"
#include "hang_detect/stacks/stacks.h"

extern char** environ;

namespace reft {
namespace remote_stack_test {

using ::testing::HasSubstr;

// A program that stops itself in inner(), and is killed in the end.
class StoppedPython {
 public:
  StoppedPython() {
    const char* script =
        "import os, signal\n"
        "def inner():\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "def outer():\n"
        "    inner()\n"
        "outer()\n";
    const char* arguments[] = {"python3", "-c", script, nullptr};
    if (::posix_spawnp(&pid_, "python3", nullptr, nullptr, const_cast<char**>(arguments),
                       environ) != 0) {
      pid_ = 0;
      return;
    }
    int status = 0;
    if (::waitpid(pid_, &status, WUNTRACED) != pid_ || !WIFSTOPPED(status)) {
      pid_ = 0;  // it has ended
    }
  }
  ~StoppedPython() {
    if (pid_ != 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  StoppedPython(const StoppedPython&) = delete;
  StoppedPython& operator=(const StoppedPython&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

TEST(RemoteStack, OfAStoppedPythonTellsWhereItStands) {
  const StoppedPython python;
  if (python.pid() == 0) {
    GTEST_SKIP() << "no python3 here";
  }
  const RemoteStacks read = readRemoteStacks(python.pid());
  if (read.version != "3.11" && read.version != "3.12" && read.version != "3.13") {
    GTEST_SKIP() << "python3 is of another version: " << read.error;
  }
  EXPECT_EQ(read.error, "");
  const Stacks stacks = parseStacks(read.text);
  ASSERT_EQ(stacks.threads.size(), 1u);
  EXPECT_TRUE(stacks.threads[0].main);
  std::vector<std::string> frames;
  for (const StackFrame& frame : stacks.threads[0].frames) {
    frames.push_back(frame.file + ":" + std::to_string(frame.line) + " " + frame.function);
  }
  EXPECT_EQ(frames, (std::vector<std::string>{"<string>:3 inner", "<string>:5 outer",
                                              "<string>:6 <module>"}));
  ASSERT_EQ(stacks.native.size(), 1u);
  EXPECT_EQ(stacks.native[0].state, "T");
}

TEST(RemoteStack, OfWhatIsNoPythonSaysSo) {
  const RemoteStacks read = readRemoteStacks(::getpid());  // this test
  EXPECT_THAT(read.error, HasSubstr("is no CPython"));
  EXPECT_THAT(read.text, HasSubstr("Native thread " + std::to_string(::getpid())));
}

TEST(RemoteStack, OfNobodySaysSo) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::_exit(0);
  }
  ::waitpid(pid, nullptr, 0);
  EXPECT_THAT(readRemoteStacks(pid).error, HasSubstr("there is no process"));
  EXPECT_THAT(readRemoteStacks(0).error, HasSubstr("there is no process"));
  EXPECT_THAT(readRemoteStacks(-1).error, HasSubstr("there is no process"));
}

TEST(RemoteStack, OfAProcessThatHasEndedButIsNotReapedSaysSo) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::_exit(0);
  }
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
  EXPECT_THAT(readRemoteStacks(pid).error, HasSubstr("has ended"));
  ::waitpid(pid, nullptr, 0);
}

ReadAt readerOf(const std::string& bytes) {
  return [&bytes](uint64_t offset, void* into, size_t count) {
    if (offset > bytes.size() || count > bytes.size() - offset) {
      return false;
    }
    std::memcpy(into, bytes.data() + offset, count);
    return true;
  };
}

TEST(ElfSymbols, OfThisTestHoldTheFunctionsOfItsLibraries) {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const auto found = findElfSymbols(readerOf(bytes), {"main", "no such symbol"});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->value.count("main"), 1u);
  EXPECT_EQ(found->value.size(), 1u);
  for (const size_t size : {size_t{0}, size_t{10}, size_t{64}, size_t{100}, bytes.size() / 2}) {
    const std::string cut = bytes.substr(0, size);
    const auto less = findElfSymbols(readerOf(cut), {"main"});
    EXPECT_TRUE(!less || less->value.empty()) << size;
  }
}

TEST(ElfFunctions, AreThoseThatHoldTheAddresses) {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const uint64_t begin = findElfSymbols(readerOf(bytes), {"main"})->value.at("main");
  const auto found = findElfFunctions(readerOf(bytes), {begin + 1, begin, UINT64_MAX, begin + 1});
  EXPECT_EQ(found.size(), 2u);
  EXPECT_EQ(found.at(begin).name, "main");
  EXPECT_EQ(found.at(begin + 1).begin, begin);
  for (const size_t size : {size_t{0}, size_t{10}, size_t{64}, size_t{100}, bytes.size() / 2}) {
    const std::string cut = bytes.substr(0, size);
    EXPECT_LE(findElfFunctions(readerOf(cut), {begin}).size(), 1u) << size;
  }
}

TEST(ProcessMaps, AreReadWithPathsThatHoldBlanks) {
  const auto ranges = parseMaps(
      "55d0-55e0 r--p 00000000 fe:01 1234                       /opt/my program\n"
      "7ffe-8000 rwxp 00001000 00:00 0                          [stack]\n"
      "9000-a000 rw-p 00000000 00:00 0 \n"
      "no line of this kind\n"
      "b000-a000 rw-p 00000000 00:00 0 \n");
  ASSERT_EQ(ranges.size(), 3u);
  EXPECT_EQ(ranges[0].path, "/opt/my program");
  EXPECT_EQ(ranges[0].inode, 1234u);
  EXPECT_FALSE(ranges[0].executable);
  EXPECT_TRUE(ranges[1].executable);
  EXPECT_EQ(ranges[1].offset, 0x1000u);
  EXPECT_EQ(ranges[2].begin, 0x9000u);
  EXPECT_EQ(ranges[2].path, "");
}

}  // namespace remote_stack_test
}  // namespace reft
