#include "hang_detect/evidence/oom_kills.h"

#include <filesystem>
#include <fstream>

#include <unistd.h>

#include <gtest/gtest.h>

namespace reft {
namespace oom_kills_test {

namespace fs = std::filesystem;

class OomKills : public testing::Test {
 protected:
  OomKills() : root_(fs::temp_directory_path() / ("oom-" + std::to_string(::getpid()))) {}
  ~OomKills() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  fs::path root_;
};

TEST_F(OomKills, AreInMemoryEventsOfVersionTwo) {
  write("proc/7/cgroup", "0::/pods/a\n");
  write("sys/fs/cgroup/pods/a/memory.events",
        "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n");
  const auto counter = oomCounterOf(7, root_);
  EXPECT_EQ(counter, root_ / "sys/fs/cgroup/pods/a/memory.events");
  EXPECT_EQ(oomKills(counter), 2);
}

TEST_F(OomKills, AreInOomControlOfVersionOneEvenWhereBothAreMounted) {
  write("proc/7/cgroup", "4:cpu,memory:/b\n3:cpuset:/\n0::/\n");
  write("sys/fs/cgroup/memory/b/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
  write("sys/fs/cgroup/memory.events", "oom_kill 1\n");
  EXPECT_EQ(oomKills(oomCounterOf(7, root_)), 5);
}

TEST_F(OomKills, AreThoseOfTheMountWhereThePathIsTheHosts) {
  write("proc/7/cgroup", "0::/kubepods/pod1/c\n");
  write("sys/fs/cgroup/memory.events", "oom_kill 1\n");
  EXPECT_EQ(oomKills(oomCounterOf(7, root_)), 1);
}

TEST_F(OomKills, AreUnknownWithoutACounter) {
  EXPECT_EQ(oomCounterOf(7, root_), "");
  EXPECT_EQ(oomKills(""), -1);
  write("proc/7/cgroup", "nonsense\n0::/x\n::\n");
  write("sys/fs/cgroup/x/memory.events", "oom_kill many\n");
  EXPECT_EQ(oomCounterOf(7, root_), "");
}

}  // namespace oom_kills_test
}  // namespace reft
