#include "agent/hang/report_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

namespace reft::agent {

namespace report_folder_test {

namespace fs = std::filesystem;

class ReportFolderTest : public ::testing::Test {
 protected:
  ReportFolderTest() {
    std::string name = fs::temp_directory_path() / "reft-reports-XXXXXX";
    root = ::mkdtemp(name.data());
    directory.reset(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ~ReportFolderTest() override { fs::remove_all(root); }

  ReportFolder folder(ReportFolder::Limits limits = {}) { return {directory.get(), root, limits}; }
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(root + "/verdicts")) {
      found.insert(entry.path().filename());
    }
    return found;
  }

  std::string root;
  UniqueFd directory;
  bool on_disk = false;
};

TEST_F(ReportFolderTest, NamesGrowWhateverTheClockSays) {
  const auto first = folder().write("{}", "text", true, on_disk);
  EXPECT_TRUE(on_disk);
  // Another agent in the same place, after its clock was set: the number still grows.
  const auto second = folder().write("{}", "text", false, on_disk);
  EXPECT_EQ(first.rfind(root + "/verdicts/000001-", 0), 0u);
  EXPECT_EQ(second.rfind(root + "/verdicts/000002-", 0), 0u);
  EXPECT_EQ(names().size(), 4u);
}

TEST_F(ReportFolderTest, TheOldestReportsGoFirst) {
  auto reports = folder({3, 1 << 20});
  for (int i = 0; i < 5; ++i) {
    reports.write("{}", "text", false, on_disk);
  }
  const auto left = names();
  ASSERT_EQ(left.size(), 6u);
  EXPECT_EQ(left.begin()->substr(0, 6), "000003");
}

TEST_F(ReportFolderTest, BytesAreBoundedButTheNewestReportStays) {
  auto reports = folder({100, 5000});
  for (int i = 0; i < 3; ++i) {
    reports.write(std::string(2000, ' '), "text", false, on_disk);
  }
  EXPECT_EQ(names().size(), 4u);
  reports.write(std::string(9000, ' '), "text", false, on_disk);
  const auto left = names();
  ASSERT_EQ(left.size(), 2u);
  EXPECT_EQ(left.begin()->substr(0, 6), "000004");
}

TEST_F(ReportFolderTest, WhatIsNotAReportStays) {
  fs::create_directory(root + "/verdicts");
  std::ofstream(root + "/verdicts/notes.txt") << "mine";
  auto reports = folder({1, 1 << 20});
  reports.write("{}", "text", false, on_disk);
  reports.write("{}", "text", false, on_disk);
  EXPECT_EQ(names().size(), 3u);
}

TEST_F(ReportFolderTest, ALinkInPlaceOfTheFolderIsNotFollowed) {
  fs::create_directory(root + "/elsewhere");
  fs::create_directory_symlink(root + "/elsewhere", root + "/verdicts");
  folder().write("{}", "text", false, on_disk);
  EXPECT_FALSE(on_disk);
  EXPECT_TRUE(fs::is_empty(root + "/elsewhere"));
}

TEST_F(ReportFolderTest, AFolderThatWasRemovedIsMadeAnew) {
  auto reports = folder();
  reports.write("{}", "text", false, on_disk);
  fs::remove_all(root + "/verdicts");
  reports.write("{}", "text", false, on_disk);
  EXPECT_TRUE(on_disk);
  EXPECT_EQ(names().begin()->substr(0, 6), "000002");
}

}  // namespace report_folder_test

}  // namespace reft::agent
