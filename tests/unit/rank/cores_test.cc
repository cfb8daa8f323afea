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
  double quota(const std::string& self) const {
    write("self", self);
    return coresOfQuota(root_.string(), (root_ / "self").string());
  }
  std::filesystem::path root_;
};

TEST_F(CoresTest, TheTightestQuotaOfAllGroupsCounts) {
  EXPECT_EQ(quota("0::/a/b\n"), HUGE_VAL);
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), HUGE_VAL);
  write("a/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota("12:cpu:/x\n0::/a/b\n"), 1.5);
  write("a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 0.5);
  write("cpu.max", "1000 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 0.5);
  EXPECT_EQ(quota("0::/\n"), 0.01) << "as in a container";
  EXPECT_EQ(quota("12:cpu:/x\n"), HUGE_VAL);
  EXPECT_EQ(quota("0::/../b\n"), HUGE_VAL);
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
