#include "intercept/base/safe_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

namespace reft {

namespace safe_files_test {

namespace fs = std::filesystem;

using Open = UniqueFd (*)(int, const std::string&, int, mode_t) noexcept;

class SafeFiles : public ::testing::Test {
 protected:
  SafeFiles() {
    std::string name = fs::temp_directory_path() / "reft-safe-XXXXXX";
    root = fs::canonical(::mkdtemp(name.data()));
    at.reset(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    fs::create_directory(root + "/folder");
    std::ofstream(root + "/folder/file") << "text";
    ::chmod((root + "/folder/file").c_str(), 0600);
    fs::create_directory_symlink(root + "/folder", root + "/link");
    fs::create_symlink(root + "/folder/file", root + "/file-link");
  }
  ~SafeFiles() override { fs::remove_all(root); }

  UniqueFd file() const { return openBeneath(at.get(), "folder/file", O_RDONLY); }

  std::string root;
  UniqueFd at;
};

class OpenBeneath : public SafeFiles, public ::testing::WithParamInterface<Open> {};

TEST_P(OpenBeneath, OpensWhatIsBelow) {
  EXPECT_TRUE(GetParam()(at.get(), "folder/file", O_RDONLY, 0));
  EXPECT_TRUE(GetParam()(at.get(), "folder/new", O_WRONLY | O_CREAT | O_EXCL, 0600));
  EXPECT_FALSE(GetParam()(at.get(), "folder/absent", O_RDONLY, 0));
  EXPECT_EQ(errno, ENOENT);
}

TEST_P(OpenBeneath, FollowsNoLinkAndLeavesNoFolder) {
  for (const auto* name :
       {"link/file", "file-link", "../x", "folder/../../etc/passwd", "/etc/passwd"}) {
    EXPECT_FALSE(GetParam()(at.get(), name, O_RDONLY, 0)) << name;
  }
  EXPECT_FALSE(GetParam()(at.get(), "file-link", O_WRONLY | O_CREAT, 0600));
}

INSTANTIATE_TEST_SUITE_P(Kernels, OpenBeneath, ::testing::Values(&openBeneath, &openStepwise));

TEST_F(SafeFiles, AChainOfOwnFoldersIsSafe) {
  EXPECT_EQ(chainProblem(root + "/folder"), "");
  EXPECT_EQ(chainProblem(root + "/link"), "");  // leads to one
}

TEST_F(SafeFiles, AFolderThatOthersMayChangeIsNamed) {
  ::chmod((root + "/folder").c_str(), 0777);
  fs::create_directory(root + "/folder/inner");
  for (const auto* name : {"/folder", "/folder/inner", "/link", "/link/inner"}) {
    EXPECT_NE(chainProblem(root + name).find("folder is writable by other users"),
              std::string::npos)
        << name;
  }
  ::chmod((root + "/folder").c_str(), 01777);  // as /tmp
  EXPECT_EQ(chainProblem(root + "/folder/inner"), "");
}

TEST_F(SafeFiles, OnlyAPrivateFileWithOneNameIsOwn) {
  const auto path = root + "/folder/file";
  EXPECT_EQ(ownFileProblem(file().get()), "");
  ::chmod(path.c_str(), 0640);
  EXPECT_NE(ownFileProblem(file().get()), "");
  ::chmod(path.c_str(), 0600);
  fs::create_hard_link(path, root + "/second");
  EXPECT_EQ(ownFileProblem(file().get()), "has 2 names");
  EXPECT_EQ(ownFileProblem(at.get()), "not a regular file");
}

TEST_F(SafeFiles, AFileIsAtItsPathUntilItIsReplaced) {
  const auto fd = file();
  const auto path = root + "/folder/file";
  EXPECT_TRUE(isAt(fd.get(), path));
  EXPECT_FALSE(isAt(fd.get(), root + "/file-link"));
  fs::remove(path);
  EXPECT_FALSE(isAt(fd.get(), path));
  std::ofstream(path) << "another";
  EXPECT_FALSE(isAt(fd.get(), path));
}

}  // namespace safe_files_test

}  // namespace reft
