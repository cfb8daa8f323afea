#include "agent/health/health_program.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "hang_detect/evidence/hardware_sample.h"

namespace reft::agent {
namespace health_program_test {

// A program that stands for reft-health.
class FakeProgram {
 public:
  explicit FakeProgram(const std::string& script)
      : path_(::testing::TempDir() + "reft_health_" + std::to_string(::getpid())) {
    std::ofstream(path_) << "#!/bin/sh\n" << script << "\n";
    ::chmod(path_.c_str(), 0700);
  }
  ~FakeProgram() { ::unlink(path_.c_str()); }
  FakeProgram(const FakeProgram&) = delete;
  FakeProgram& operator=(const FakeProgram&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Until `done`, or a minute has passed.
template <typename Done>
bool waitFor(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

std::string lineFrom(HealthProgram& program) {
  std::string line = "no line";
  waitFor([&] {
    const auto got = program.line();
    line = got.value_or(line);
    return got.has_value() || !program.running();
  });
  return line;
}

TEST(HealthProgram, GivesALineForEachRequest) {
  const FakeProgram fake("while read -r _; do echo \"$*\"; done");
  HealthProgram program(fake.path(), {"a", "b"});
  EXPECT_EQ(program.fd(), -1);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(program.ask());
    EXPECT_EQ(lineFrom(program), "a b");
    EXPECT_FALSE(program.line());
  }
  EXPECT_GE(program.fd(), 0);
  EXPECT_EQ(program.starts(), 1U);
}

TEST(HealthProgram, GivesItNoSettingsOfTheJob) {
  ::setenv("REFT_JOB_ID", "x", 1);
  ::setenv("REFTLESS", "kept", 1);
  const char* const before = std::getenv("LD_PRELOAD");
  const std::string preloaded = before == nullptr ? "" : before;
  ::setenv("LD_PRELOAD", "/nonexistent/hook.so", 1);
  const FakeProgram fake(
      "read -r _; echo \"${REFT_JOB_ID-none} $REFTLESS ${LD_PRELOAD-none}\"; read -r _");
  HealthProgram program(fake.path());
  ASSERT_TRUE(program.ask());
  EXPECT_EQ(lineFrom(program), "none kept none");
  ::unsetenv("REFT_JOB_ID");
  ::unsetenv("REFTLESS");
  ::unsetenv("LD_PRELOAD");
  if (before != nullptr) {
    ::setenv("LD_PRELOAD", preloaded.c_str(), 1);
  }
}

TEST(HealthProgram, StartsAnotherOneAfterItsEnd) {
  const FakeProgram fake("read -r _; echo once");
  HealthProgram program(fake.path());
  for (uint64_t i = 1; i <= 3; ++i) {
    ASSERT_TRUE(program.ask());
    EXPECT_EQ(lineFrom(program), "once");
    EXPECT_TRUE(waitFor([&] { return !program.line() && !program.running(); }));
    EXPECT_EQ(program.starts(), i);
  }
}

TEST(HealthProgram, IsNotThereIfItCannotBeStarted) {
  HealthProgram program("/nonexistent/reft-health");
  EXPECT_FALSE(program.ask());
  EXPECT_FALSE(program.running());
  EXPECT_FALSE(program.line());
}

TEST(HealthProgram, IsKilledIfItPrintsWithoutEnd) {
  const FakeProgram fake("yes | tr -d '\\n'");
  HealthProgram program(fake.path());
  ASSERT_TRUE(program.ask());
  EXPECT_EQ(lineFrom(program), "no line");
  EXPECT_FALSE(program.running());
}

TEST(HealthProgram, NeverWaitsForOneThatHangs) {
  const FakeProgram fake("exec sleep 600");
  HealthProgram program(fake.path());
  // More than the socket holds: none of these blocks.
  for (int i = 0; i < 1'000'000; ++i) {
    ASSERT_TRUE(program.ask());
  }
  EXPECT_FALSE(program.line());
  program.kill();
  EXPECT_FALSE(program.running());
}

}  // namespace health_program_test
}  // namespace reft::agent
