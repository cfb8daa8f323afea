#include "hang_detect/evidence/cgroup.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft {
namespace cgroup_test {

namespace fs = std::filesystem;
using testing::ElementsAre;

class CgroupTest : public testing::Test {
 protected:
  CgroupTest() : root_(fs::temp_directory_path() / ("cgroup-" + std::to_string(::getpid()))) {
    fs::create_directories(root_ / "proc/7");
    mounts_ = (root_ / "sys/fs/cgroup").string();
  }
  ~CgroupTest() override { fs::remove_all(root_); }

  std::vector<Cgroup> groups(const std::string& text, std::string_view controller) const {
    std::ofstream(root_ / "proc/7/cgroup") << text;
    return cgroupsOf("7", controller, root_.string());
  }

  fs::path root_;
  std::string mounts_;
};

TEST_F(CgroupTest, FoldersGoFromTheOwnGroupToTheMount) {
  const auto found = groups("0::/a/b\n", "memory");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].is_first);
  EXPECT_THAT(found[0].folders, ElementsAre(mounts_ + "/a/b", mounts_ + "/a", mounts_));
}

TEST_F(CgroupTest, TheRootHasOneFolder) {
  EXPECT_THAT(groups("0::/\n", "cpu")[0].folders, ElementsAre(mounts_));
}

TEST_F(CgroupTest, VersionOneComesFirstIfItHasTheController) {
  const std::string text = "0::/x\n5:cpuset:/no\n4:cpu,cpuacct:/y\n";
  const auto found = groups(text, "cpu");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(found[0].is_first);
  EXPECT_THAT(found[0].folders, ElementsAre(mounts_ + "/cpu/y", mounts_ + "/cpu"));
  EXPECT_FALSE(found[1].is_first);
  EXPECT_EQ(groups(text, "memory").size(), 1u);
}

TEST_F(CgroupTest, WhatCannotBeReadIsNotThere) {
  EXPECT_TRUE(groups("", "cpu").empty());
  EXPECT_TRUE(groups("nonsense\n::\n:\n0:\n", "cpu").empty());
  EXPECT_TRUE(cgroupsOf("8", "cpu", root_.string()).empty());
}

}  // namespace cgroup_test
}  // namespace reft
