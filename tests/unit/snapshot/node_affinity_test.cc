#include "snapshot/node_affinity.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace reft {
namespace {

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
  EXPECT_EQ(numbers(parseCpuList("0-3,8,10-11\n").value()), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(numbers(parseCpuList("1023").value()), (std::vector<int>{1023}));
  EXPECT_TRUE(numbers(parseCpuList("\n").value()).empty()) << "a node of memory alone";
}

TEST(CpuList, WhatIsNoneIsRefused) {
  for (const char* text : {"x", "-1", "1-", "3-1", "1,", ",1", "1,,2", "1 2", "1024", "0-1024", "99999999999", "0x1"}) {
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
    std::ofstream(folder_ / "online") << (number == 0 ? "0" : "0," + std::to_string(number)) << "\n";
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

}  // namespace
}  // namespace reft
