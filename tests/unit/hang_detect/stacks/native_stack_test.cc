#include "hang_detect/stacks/native_stack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace reft {
namespace native_stack_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// "EVAL" is the interpreter's loop.
NativeStack native(const std::vector<std::string>& functions, bool complete = true) {
  NativeStack stack;
  stack.complete = complete;
  for (const std::string& function : functions) {
    stack.frames.push_back({function, "lib.so", 16, function == "EVAL"});
  }
  return stack;
}

PythonThread python(const std::vector<std::string>& functions, const std::vector<size_t>& runs) {
  PythonThread thread;
  thread.runs = runs;
  for (const std::string& function : functions) {
    thread.frames.push_back({"train.py", 7, function});
  }
  return thread;
}

std::vector<std::string> names(const MergedStack& stack) {
  std::vector<std::string> found;
  for (const MergedFrame& frame : stack.frames) {
    found.push_back(frame.python ? "py " + frame.line.function : frame.native.function);
  }
  return found;
}

TEST(MergeStack, EachRunOfTheLoopGivesWayToItsPythonFrames) {
  const auto merged = mergeStack(native({"usleep", "EVAL", "map_next", "EVAL", "main"}),
                                 python({"a", "b", "c"}, {1, 2}));
  EXPECT_TRUE(merged.matched);
  EXPECT_EQ(merged.problem, "");
  EXPECT_THAT(names(merged), ElementsAre("usleep", "py a", "map_next", "py b", "py c", "main"));
}

TEST(MergeStack, ARunMayHaveNoFrameToShow) {
  const auto merged = mergeStack(native({"EVAL", "call", "EVAL", "main"}), python({"a"}, {0, 1}));
  EXPECT_TRUE(merged.matched);
  EXPECT_THAT(names(merged), ElementsAre("call", "py a", "main"));
}

TEST(MergeStack, WithoutPythonItIsTheNativeOne) {
  const auto merged = mergeStack(native({"poll", "start_thread"}), std::nullopt);
  EXPECT_TRUE(merged.matched);
  EXPECT_THAT(names(merged), ElementsAre("poll", "start_thread"));
}

TEST(MergeStack, ALoopThatHasJustBegunHasNoFrameYet) {
  const auto merged = mergeStack(native({"EVAL", "call", "EVAL", "main"}), python({"a"}, {1}));
  EXPECT_TRUE(merged.matched);
  EXPECT_THAT(names(merged), ElementsAre("EVAL", "call", "py a", "main"));
}

TEST(MergeStack, WhereNativeFramesEndTooSoonTheOtherPythonFramesFollow) {
  auto broken = native({"usleep", "EVAL", "jit"}, false);
  broken.problem = "native frames end";
  const auto merged = mergeStack(broken, python({"a", "b", "c"}, {2, 1}));
  EXPECT_TRUE(merged.matched);
  EXPECT_EQ(merged.problem, "native frames end");
  EXPECT_THAT(names(merged), ElementsAre("usleep", "py a", "py b", "jit", "py c"));
}

TEST(MergeStack, WherePythonFramesEndTooSoonTheOtherLoopsStay) {
  auto deep = python({"a", "b"}, {2});
  deep.truncated = true;
  const auto merged = mergeStack(native({"usleep", "EVAL", "call", "EVAL", "main"}), deep);
  EXPECT_TRUE(merged.matched);
  EXPECT_THAT(names(merged), ElementsAre("usleep", "py a", "py b", "call", "EVAL", "main"));
}

TEST(MergeStack, CountsThatDoNotAgreeAreSaidAndNothingIsGuessed) {
  const auto fewer = mergeStack(native({"usleep", "EVAL", "main"}), python({"a", "b"}, {1, 1}));
  EXPECT_FALSE(fewer.matched);
  EXPECT_THAT(fewer.problem, HasSubstr("do not match (1 interpreter loop, 2 runs of them)"));
  EXPECT_THAT(names(fewer), ElementsAre("usleep", "EVAL", "main", "py a", "py b"));
  const auto more =
      mergeStack(native({"usleep", "EVAL", "call", "EVAL", "main"}), python({"a"}, {1}));
  EXPECT_FALSE(more.matched);
  EXPECT_THAT(names(more), ElementsAre("usleep", "EVAL", "call", "EVAL", "main", "py a"));
}

TEST(MergeStack, WithoutNativeFramesPythonsAreLeft) {
  NativeStack none;
  none.problem = "a debugger is attached";
  const auto merged = mergeStack(none, python({"a", "b"}, {1, 1}));
  EXPECT_EQ(merged.problem, "a debugger is attached");
  EXPECT_THAT(names(merged), ElementsAre("py a", "py b"));
}

TEST(MergedStacks, AsJsonSayOfEachFrameWhatItIs) {
  MergedThread thread{12, "worker", "S", true,
                      mergeStack(native({"usleep", "EVAL"}), python({"a"}, {1}))};
  const auto json =
      nlohmann::json::parse(mergedStacksJson(12, {"", "3.11", ""}, {{thread}, "some error"}));
  EXPECT_EQ(json["pid"], 12);
  EXPECT_EQ(json["native"]["error"], "some error");
  const auto& found = json["native"]["threads"].at(0);
  EXPECT_EQ(found["tid"], 12);
  EXPECT_EQ(found["main"], true);
  EXPECT_EQ(found["matched"], true);
  EXPECT_EQ(
      found["frames"].at(0),
      nlohmann::json(
          {{"kind", "native"}, {"function", "usleep"}, {"object", "lib.so"}, {"offset", "0x10"}}));
  EXPECT_EQ(
      found["frames"].at(1),
      nlohmann::json({{"kind", "python"}, {"file", "train.py"}, {"line", 7}, {"function", "a"}}));
}

}  // namespace native_stack_test
}  // namespace reft
