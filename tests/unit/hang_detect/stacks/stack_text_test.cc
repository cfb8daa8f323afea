#include <string>

#include <gtest/gtest.h>

#include "hang_detect/stacks/stacks.h"

namespace reft {
namespace stack_text_test {

TEST(StackText, ReadsThreadsAndFrames) {
  const Stacks stacks = parseStacks(
      "Thread 0x00007f33 (most recent call first):\n"
      "  File \"/usr/lib/python3.11/threading.py\", line 324 in wait\n"
      "\n"
      "Current thread 0x00007f44 [MainThread] (most recent call first):\n"
      "  File \"a, line 3 in b.py\", line 12 in <module>\n"
      "  File ???, line ??? in ???\n"
      "Main thread 0x00007f44\n"
      "Native thread 17 S pt_autograd_0\n");
  ASSERT_EQ(stacks.threads.size(), 2u);
  EXPECT_FALSE(stacks.threads[0].main);
  EXPECT_EQ(stacks.threads[0].frames.at(0).line, 324);
  EXPECT_TRUE(stacks.threads[1].main);
  EXPECT_TRUE(stacks.threads[1].current);
  EXPECT_EQ(stacks.threads[1].name, "MainThread");
  EXPECT_EQ(stacks.threads[1].frames.at(0).file, "a, line 3 in b.py");
  EXPECT_EQ(stacks.threads[1].frames.at(0).function, "<module>");
  EXPECT_EQ(stacks.threads[1].frames.at(1).line, 0);
  ASSERT_EQ(stacks.native.size(), 1u);
  EXPECT_EQ(stacks.native[0].name, "pt_autograd_0");
}

TEST(StackText, ReadsWhoHoldsTheGilAndWhoWaitsForIt) {
  const std::string threads =
      "Thread 0x2 (most recent call first):\n  File \"x\", line 1 in f\n"
      "Thread 0x1 (most recent call first):\n  File \"y\", line 2 in g\n";
  const auto all = [&](const std::string& line) { return parseStacks(threads + line).threads; };
  EXPECT_TRUE(all("GIL held by 0x2\n")[0].holds_gil);
  EXPECT_FALSE(all("GIL held by 0x2\n")[1].holds_gil);
  EXPECT_EQ(all("GIL held by 0x2\n")[1].awaits_gil_of, "");
  const auto awaited = all("GIL held by 0x2, awaited by 0x1\n");
  EXPECT_TRUE(awaited[0].holds_gil);
  EXPECT_EQ(awaited[0].awaits_gil_of, "");
  EXPECT_FALSE(awaited[1].holds_gil);
  EXPECT_EQ(awaited[1].awaits_gil_of, "0x2");
  for (const char* other :
       {"GIL held by nobody\n", "  GIL held by 0x2\n", "GIL held by 0x3, awaited by\n", "\n"}) {
    for (const ThreadStack& thread : all(other)) {
      EXPECT_FALSE(thread.holds_gil) << other;
      EXPECT_EQ(thread.awaits_gil_of, "") << other;
    }
  }
}

TEST(StackText, TakesTheOldestThreadAsMainWhenNotTold) {
  const Stacks stacks = parseStacks(
      "Thread 0x2 (most recent call first):\n  File \"x\", line 1 in f\n"
      "Thread 0x1 (most recent call first):\n  File \"y\", line 2 in g\n");
  ASSERT_EQ(stacks.threads.size(), 2u);
  EXPECT_TRUE(stacks.threads[1].main);
}

TEST(StackText, KnowsThatThePrinterStopped) {
  const Stacks frames =
      parseStacks("Thread 0x2 (most recent call first):\n  File \"x\", line 1 in f\n  ...\n");
  EXPECT_TRUE(frames.threads.at(0).truncated);
  const Stacks threads =
      parseStacks("Thread 0x2 (most recent call first):\n  File \"x\", line 1 in f\n...\n");
  EXPECT_TRUE(threads.truncated);
  EXPECT_FALSE(
      threads.threads.at(0).main);  // the main thread may be among those that were left out
}

TEST(StackText, SkipsWhatItDoesNotKnow) {
  EXPECT_TRUE(parseStacks("").threads.empty());
  EXPECT_TRUE(parseStacks("  File \"x\", line 1 in f\n").threads.empty());
  EXPECT_TRUE(parseStacks("Thread state\nThread \nNative thread -3 S x\nNative thread x\n")
                  .threads.empty());
  EXPECT_TRUE(parseStacks(std::string(100000, '\n')).threads.empty());
  EXPECT_TRUE(parseStacks("Thread 0x2 (most recent call first):\n  File \"x\n")
                  .threads.at(0)
                  .frames.empty());
}

TEST(StackText, KeepsABoundedNumberOfThreadsAndFrames) {
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    text += "Thread 0x2 (most recent call first):\n  File \"x\", line 1 in f\n";
  }
  EXPECT_EQ(parseStacks(text).threads.size(), 1024u);
  text = "Thread 0x2 (most recent call first):\n";
  for (int i = 0; i < 3000; ++i) {
    text += "  File \"x\", line 1 in f\n";
  }
  const Stacks stacks = parseStacks(text);
  EXPECT_EQ(stacks.threads.at(0).frames.size(), 1024u);
  EXPECT_TRUE(stacks.truncated);
}

}  // namespace stack_text_test
}  // namespace reft
