#include "hang_detect/stacks/stack_dump.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/rank/stack_reply.h"
#include "hang_detect/stacks/stacks.h"

namespace reft {
namespace stack_dump_test {

using ::testing::HasSubstr;

std::string printOne(int fd, std::chrono::milliseconds) {
  const std::string text =
      "Thread 0x0000000000000001 (most recent call first):\n  File \"x.py\", line 3 in f";
  return ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? ""
                                                                                    : "short write";
}

TEST(StackDump, AddsNativeThreadsToWhatIsPrinted) {
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  std::thread other([&] {
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return stop; });
  });
  ::pthread_setname_np(other.native_handle(), "a (b) c");
  StackDumper dumper(&printOne);
  const StackDump dump = dumper.dump();
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  wake.notify_all();
  other.join();
  EXPECT_EQ(dump.error, "");
  const Stacks stacks = parseStacks(dump.text);
  ASSERT_EQ(stacks.threads.size(), 1u);
  EXPECT_EQ(stacks.threads[0].frames.at(0).file, "x.py");
  // A sanitizer may have a thread of its own.
  EXPECT_TRUE(std::any_of(stacks.native.begin(), stacks.native.end(),
                          [](const auto& t) { return t.name == "a (b) c"; }));
  EXPECT_THAT(dump.text, HasSubstr("Main thread 0x"));
}

TEST(StackDump, SaysWhatWentWrongAndKeepsWhatThereIs) {
  StackDumper dumper([](int fd, std::chrono::milliseconds timeout) -> std::string {
    printOne(fd, timeout);
    return "the list of threads changed";
  });
  const StackDump dump = dumper.dump();
  EXPECT_EQ(dump.error, "the list of threads changed");
  EXPECT_EQ(parseStacks(dump.text).threads.size(), 1u);
  StackDumper none(nullptr);
  EXPECT_EQ(none.dump().error, "no stack printer");
}

TEST(StackDump, NeverGivesThePrinterMoreThanASecond) {
  static std::chrono::milliseconds given;
  StackDumper dumper([](int, std::chrono::milliseconds timeout) -> std::string {
    given = timeout;
    return "";
  });
  dumper.dump(std::chrono::hours(1));
  EXPECT_LE(given, StackDumper::kMaxTimeout);
}

TEST(StackReply, CarriesStacksToTheEvidence) {
  const std::string reply =
      stackReplyJson(R"({"id": 1})", 3, {"Thread 0x1 (most recent call first):\n", "late"});
  RankEvidence rank;
  addStackReply(rank, reply);
  EXPECT_TRUE(rank.answered);
  EXPECT_EQ(rank.error, "stacks: late");
  EXPECT_EQ(rank.stacks.parsed().threads.size(), 1u);
}

TEST(StackReply, DamagedOnesAreAnError) {
  for (const char* payload :
       {"", "[]", "{}", R"({"text": 3})", "{\"text\": \"\xff\"", R"({"text": {"a": [[[[)"}) {
    RankEvidence rank;
    addStackReply(rank, payload);
    EXPECT_FALSE(rank.answered) << payload;
    EXPECT_THAT(rank.error, HasSubstr("stacks"));
  }
}

TEST(StackReply, EchoesTheIdAndReplacesBadBytes) {
  const StackDump dump{"caf\xe9", "e"};
  const auto reply = nlohmann::json::parse(stackReplyJson(R"({"id": 7})", 3, dump));
  EXPECT_EQ(reply["id"], 7);
  EXPECT_EQ(reply["rank"], 3);
  EXPECT_EQ(reply["pid"], ::getpid());
  EXPECT_EQ(reply["error"], "e");
  EXPECT_TRUE(nlohmann::json::parse(stackReplyJson("no json", 3, dump))["id"].is_null());
}

}  // namespace stack_dump_test
}  // namespace reft
