#include "snapshot/vault/mapping.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <string>

#include "intercept/base/unique_fd.h"

namespace reft {

namespace mapping_test {

constexpr uint64_t kBytes = 64 << 10;

void onLostPage(int, siginfo_t* info, void*) {
  if (!replaceLostPage(info->si_addr)) {
    ::_exit(3);
  }
}

TEST(Mapping, AFileThatIsCutOffReadsAsZerosInsteadOfEndingTheReader) {
  const UniqueFd file(::memfd_create("cut", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  Mapping mapping(file.get(), 0, kBytes, true);
  mapping.data()[kBytes - 1] = std::byte{7};
  struct sigaction action {};
  struct sigaction before {};
  action.sa_sigaction = onLostPage;
  action.sa_flags = SA_SIGINFO;
  ASSERT_EQ(::sigaction(SIGBUS, &action, &before), 0);
  ASSERT_EQ(::ftruncate(file.get(), 0), 0);
  const auto* last = reinterpret_cast<const volatile std::byte*>(mapping.data() + kBytes - 1);
  const std::byte found = *last;
  ::sigaction(SIGBUS, &before, nullptr);
  EXPECT_EQ(found, std::byte{0});
  EXPECT_TRUE(mapping.lostPages());
  EXPECT_FALSE(Mapping(file.get(), 0, kBytes, true).lostPages()) << "another one on its place";
}

TEST(Mapping, OnlyPagesOfMappingsAreReplaced) {
  int outside = 0;
  EXPECT_FALSE(replaceLostPage(&outside));
  const UniqueFd file(::memfd_create("gone", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  const void* address = nullptr;
  {
    const Mapping mapping(file.get(), 0, kBytes, false);
    address = mapping.data();
  }
  EXPECT_FALSE(replaceLostPage(address));
}

TEST(Mapping, CoreDumpsLeaveItOut) {
  const UniqueFd file(::memfd_create("reft-dd-test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  const Mapping mapping(file.get(), 0, kBytes, false);
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool within = false;
  bool left_out = false;
  while (std::getline(maps, line)) {
    within = within || line.find("reft-dd-test") != std::string::npos;
    if (within && line.starts_with("VmFlags:")) {
      left_out = line.find(" dd") != std::string::npos;
      break;
    }
  }
  EXPECT_TRUE(within);
  EXPECT_TRUE(left_out);
}

}  // namespace mapping_test

}  // namespace reft
