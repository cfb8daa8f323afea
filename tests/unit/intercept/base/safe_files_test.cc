#include "intercept/base/safe_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <initializer_list>
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

// An unprivileged process cannot give files away, so these owners are made up: / belongs to the
// user of a user namespace, as in a container without root.
TEST(PartOfAPath, MayBelongToThisUserToRootAndToTheOwnerOfSlash) {
  constexpr Trusted kTrusted{.user = 1000, .system = 65534};
  struct Case {
    mode_t mode;
    uid_t owner;
    const char* problem;
  };
  constexpr mode_t kFolder = S_IFDIR | 0755;
  constexpr mode_t kLink = S_IFLNK | 0777;
  for (const auto& [mode, owner, problem] : std::initializer_list<Case>{
           {kFolder, 1000, ""},
           {kFolder, 65534, ""},
           {kFolder, 0, ""},
           {kFolder, 1001, "/part belongs to user 1001"},
           {kLink, 1000, ""},
           {kLink, 65534, ""},
           {kLink, 0, ""},
           {kLink, 1001, "/part is a link of user 1001"},
           {S_IFDIR | 0775, 1000, "/part is writable by other users"},
           {S_IFDIR | 0777, 0, "/part is writable by other users"},
           {S_IFDIR | 01777, 0, ""},
           {S_IFREG | 0644, 1000, "/part is not a directory"},
       }) {
    struct stat info {};
    info.st_mode = mode;
    info.st_uid = owner;
    EXPECT_EQ(partProblem("/part", info, kTrusted), problem) << std::oct << mode << " " << owner;
  }
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
