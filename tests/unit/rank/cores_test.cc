#include "python/rank/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace reft {
namespace cores_test {

class CoresTest : public testing::Test {
 protected:
  CoresTest() {
    std::string folder = testing::TempDir() + "coresXXXXXX";
    root_ = ::mkdtemp(folder.data());
  }
  ~CoresTest() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  double quota(const std::string& groups) const {
    write("proc/self/cgroup", groups);
    return coresOfQuota(root_.string());
  }
  std::filesystem::path root_;
};

TEST_F(CoresTest, TheTightestQuotaOfAllGroupsCounts) {
  const std::string mount = "sys/fs/cgroup/";
  EXPECT_EQ(quota("0::/a/b\n"), HUGE_VAL);
  write(mount + "a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), HUGE_VAL);
  write(mount + "a/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota("12:pids:/x\n0::/a/b\n"), 1.5);
  write(mount + "a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 0.5);
  EXPECT_EQ(quota("12:pids:/x\n"), HUGE_VAL);
}

TEST_F(CoresTest, AContainersQuotaIsThatOfItsMount) {
  write("sys/fs/cgroup/cpu.max", "200000 100000\n");
  EXPECT_EQ(quota("0::/\n"), 2);
  EXPECT_EQ(quota("0::/kubepods/pod1/c\n"), 2) << "the path is the host's";
  EXPECT_EQ(quota("0::/../b\n"), 2);
}

TEST_F(CoresTest, QuotasOfVersionOneCountToo) {
  write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(quota("4:cpuacct,cpu:/job/a\n"), HUGE_VAL);
  write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000\n");
  EXPECT_EQ(quota("4:cpuacct,cpu:/job/a\n0::/\n"), 3);
}

TEST_F(CoresTest, ThreadsAreAQuarterOfTheShareAndOneAtLeast) {
  cpu_set_t mine;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(mine), &mine), 0);
  const uint32_t most = threadsForDevices(1, 1, HUGE_VAL);
  EXPECT_GE(most, 1u);
  EXPECT_LE(most, 4u);
  EXPECT_LE(most, std::max(1, CPU_COUNT(&mine) / 4));
  EXPECT_EQ(threadsForDevices(1, 1, 0.5), 1u);
  EXPECT_LE(threadsForDevices(8, 1, 32), 1u);
  EXPECT_EQ(threadsForDevices(1, 1, 4), 1u);
}

}  // namespace cores_test
}  // namespace reft
