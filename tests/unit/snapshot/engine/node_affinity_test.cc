#include "snapshot/engine/node_affinity.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "snapshot/engine/engine.h"

namespace reft {
namespace node_affinity_test {

std::vector<int> numbers(const cpu_set_t& cpus) {
  std::vector<int> found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &cpus)) {
      found.push_back(cpu);
    }
  }
  return found;
}

std::vector<int> allowed() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(cpus), &cpus), 0);
  return numbers(cpus);
}

TEST(CpuList, IsReadAsTheKernelWritesIt) {
  EXPECT_EQ(numbers(parseCpuList("0-3,8,10-11\n").value()),
            (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(numbers(parseCpuList("1023").value()), (std::vector<int>{1023}));
  EXPECT_TRUE(numbers(parseCpuList("\n").value()).empty()) << "a node of memory alone";
}

TEST(CpuList, WhatIsNoneIsRefused) {
  for (const char* text : {"x", "-1", "1-", "3-1", "1,", ",1", "1,,2", "1 2", "1024", "0-1024",
                           "99999999999", "0x1"}) {
    EXPECT_FALSE(parseCpuList(text)) << text;
  }
}

class NodeAffinityTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "nodesXXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void node(int number, const std::string& cpus) {
    const auto folder = folder_ / ("node" + std::to_string(number));
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "cpulist") << cpus << "\n";
    std::ofstream(folder_ / "online")
        << (number == 0 ? "0" : "0," + std::to_string(number)) << "\n";
  }
  // Where a thread may run that follows these captures.
  std::vector<int> after(const std::vector<int>& nodes) {
    std::vector<int> found;
    std::thread([&] {
      NodeAffinity affinity(folder_.string());
      for (const int node : nodes) {
        affinity.follow(node);
      }
      found = allowed();
    }).join();
    return found;
  }

  std::filesystem::path folder_;
  const std::vector<int> all_ = allowed();
  const std::string first_ = std::to_string(all_.front());
  const std::string last_ = std::to_string(all_.back());
};

TEST_F(NodeAffinityTest, FollowsWhatTwoCapturesAgreeOn) {
  node(0, first_);
  node(1, last_ + ",1023");
  EXPECT_EQ(after({0}), all_) << "one capture may have been on its way";
  EXPECT_EQ(after({0, 1}), all_);
  EXPECT_EQ(after({0, 0}), std::vector<int>{all_.front()});
  EXPECT_EQ(after({0, 0, 1}), std::vector<int>{all_.front()});
  EXPECT_EQ(after({0, 0, 1, 1}), std::vector<int>{all_.back()}) << "and back out of the first node";
}

TEST_F(NodeAffinityTest, NodesNeedNotBeNumberedInARow) {
  node(0, first_);
  node(4, last_);
  EXPECT_EQ(after({4, 4}), std::vector<int>{all_.back()});
}

TEST_F(NodeAffinityTest, NeverGoesWhereItWasNotAllowed) {
  node(0, "1023");  // of nobody here
  node(1, first_);
  EXPECT_EQ(after({0, 0}), all_);
  EXPECT_EQ(after({-1, -1}), all_);
  EXPECT_EQ(after({7, 7}), all_) << "a node that the folder has not";
}

TEST_F(NodeAffinityTest, OneNodeChangesNothing) {
  node(0, first_);
  EXPECT_EQ(after({0, 0}), all_);
}

TEST_F(NodeAffinityTest, DamagedFilesChangeNothing) {
  node(0, "0-");
  node(1, first_);
  EXPECT_EQ(after({0, 0}), all_);
}

TEST(NodeAffinity, KnowsItsOwnNode) {
  EXPECT_GE(NodeAffinity::currentNode(), 0);
}

// CPUs of a node of this machine.
std::vector<int> cpusOf(int node) {
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return text.empty() ? std::vector<int>{} : numbers(parseCpuList(text).value());
}

// Where the copy thread of this process may run.
std::vector<int> allowedToCopy() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "reft-copy") {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      EXPECT_EQ(::sched_getaffinity(std::stoi(task.path().filename()), sizeof(cpus), &cpus), 0);
      return numbers(cpus);
    }
  }
  return {};
}

// On a machine with two nodes, real or qemu's (-numa node,cpus=0-1 -numa node,cpus=2-3).
TEST(NodeAffinity, TheCopyThreadOfAnEngineFollowsTraining) {
  if (cpusOf(0).empty() || cpusOf(1).empty()) {
    GTEST_SKIP() << "this machine has one node with processors";
  }
  const std::vector<int> before = allowed();
  const auto vault = Vault::create({"job", 0, 1}, 2, 64);
  SnapshotEngine* voter = nullptr;
  SnapshotEngine engine(EngineOptions{}, *vault,
                        [&](const wire::Ballot& ballot) { voter->outcome(ballot); });
  voter = &engine;
  std::vector<std::byte> state(size_t{1} << 20);
  engine.setTable(
      buildTable(0, 1, {{"r", "uint8", {1 << 20}, 1 << 20, 1, -1, false}}, {}, "none", {}, 4096));
  int64_t step = 0;
  for (const int node : {1, 0}) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpusOf(node).front(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    // It follows when it takes the snapshot up, which the gate may have done by itself.
    for (int i = 0; i < 200 && allowedToCopy() != cpusOf(node); ++i) {
      const void* const address = state.data();
      CaptureInput input;
      input.step = ++step;
      input.addresses = {&address, 1};
      ASSERT_EQ(engine.capture(input), CaptureResult::kTaken);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      engine.gate();
      engine.settle();
    }
    EXPECT_EQ(allowedToCopy(), cpusOf(node));
  }
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const int cpu : before) {
    CPU_SET(cpu, &all);
  }
  ASSERT_EQ(::sched_setaffinity(0, sizeof(all), &all), 0);
}

}  // namespace node_affinity_test
}  // namespace reft
