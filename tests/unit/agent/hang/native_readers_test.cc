#include "agent/hang/native_readers.h"

#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace reft::agent {
namespace native_readers_test {

using ::testing::HasSubstr;

// A program that stands for reft-unwind.
class FakeReader {
 public:
  explicit FakeReader(const std::string& script)
      : path_(::testing::TempDir() + "reft_reader_" + std::to_string(::getpid())) {
    std::ofstream(path_) << "#!/bin/sh\n" << script << "\n";
    ::chmod(path_.c_str(), 0700);
  }
  ~FakeReader() { ::unlink(path_.c_str()); }
  FakeReader(const FakeReader&) = delete;
  FakeReader& operator=(const FakeReader&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string answerOf(NativeReaders& readers) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto finished = readers.finished();
    if (!finished.empty()) {
      EXPECT_EQ(finished.size(), 1u);
      EXPECT_EQ(finished[0].first, 5u);
      return finished[0].second;
    }
    std::this_thread::yield();
  }
  return "no answer";
}

TEST(NativeReaders, GiveWhatTheReaderPrintsOnce) {
  const FakeReader reader(R"(echo "{\"words\": \"$*\"}"; exit 1)");
  NativeReaders readers(reader.path());
  readers.start(5, 4711);
  EXPECT_EQ(nlohmann::json::parse(answerOf(readers))["words"], "4711");
  EXPECT_TRUE(readers.finished().empty());
}

TEST(NativeReaders, SayWhyThereIsNoAnswer) {
  NativeReaders nobody("/nonexistent/reft-unwind");
  nobody.start(5, 1);
  EXPECT_THAT(answerOf(nobody), HasSubstr("cannot start"));
  const FakeReader broken("echo '{'");
  NativeReaders readers(broken.path());
  readers.start(5, 1);
  EXPECT_THAT(answerOf(readers), HasSubstr("failed"));
}

TEST(NativeReaders, DoNotWaitForOneThatHangs) {
  const FakeReader hangs("exec sleep 600");
  NativeReaders readers(hangs.path(), std::chrono::milliseconds(50));
  readers.start(5, 1);
  EXPECT_THAT(answerOf(readers), HasSubstr("cannot be read within"));
}

}  // namespace native_readers_test
}  // namespace reft::agent
