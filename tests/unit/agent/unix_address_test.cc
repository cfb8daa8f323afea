#include "agent/unix_address.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace reft::agent {
namespace unix_address_test {

enum class Kind { kListens, kBound, kFull, kConnected };

// Takes `address` and keeps it; what holds it.
std::vector<UniqueFd> hold(const UnixAddress& address, Kind kind) {
  std::vector<UniqueFd> held;
  held.push_back(streamSocket());
  EXPECT_EQ(::bind(held[0].get(), address.get(), address.bytes), 0);
  if (kind == Kind::kConnected) {
    const auto elsewhere = abstractAddress("reft-test-elsewhere-" + std::to_string(::getpid()));
    held.push_back(streamSocket());
    EXPECT_EQ(::bind(held[1].get(), elsewhere.get(), elsewhere.bytes), 0);
    EXPECT_EQ(::listen(held[1].get(), 1), 0);
    EXPECT_EQ(::connect(held[0].get(), elsewhere.get(), elsewhere.bytes), 0);
  } else if (kind != Kind::kBound) {
    EXPECT_EQ(::listen(held[0].get(), 0), 0);
  }
  while (kind == Kind::kFull) {
    held.push_back(streamSocket());
    if (::connect(held.back().get(), address.get(), address.bytes) != 0) {
      break;
    }
  }
  return held;
}

// Another user that holds `address` while it lives.
class Squatter {
 public:
  Squatter(const UnixAddress& address, Kind kind) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    process_ = ::fork();
    if (process_ == 0) {
      const bool other = ::setuid(65534) == 0;
      const auto held = hold(address, kind);
      if (!other || testing::Test::HasFailure() || ::write(ends[1], "1", 1) != 1) {
        ::_exit(1);
      }
      ::pause();
      ::_exit(0);
    }
    char byte = 0;
    ::close(ends[1]);
    EXPECT_EQ(::read(ends[0], &byte, 1), 1);
    ::close(ends[0]);
  }
  ~Squatter() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Squatter(const Squatter&) = delete;
  Squatter& operator=(const Squatter&) = delete;

 private:
  pid_t process_;
};

class UnixAddressTest : public testing::Test {
 protected:
  void SetUp() override {
    if (ownerByKernel(address_) == Owner::kUnknown) {
      GTEST_SKIP() << "this kernel does not report who has a Unix socket";
    }
  }
  const UnixAddress address_ = abstractAddress("reft-test-" + std::to_string(::getpid()));
};

TEST_F(UnixAddressTest, IsNobodysBeforeItIsBoundAndAfter) {
  EXPECT_EQ(holderOf(address_).owner, Owner::kNobody);
  hold(address_, Kind::kFull);
  EXPECT_EQ(holderOf(address_).owner, Owner::kNobody);
}

TEST_F(UnixAddressTest, IsThisUsersWhetherOrNotItAnswers) {
  for (const Kind kind : {Kind::kListens, Kind::kBound, Kind::kFull}) {
    const auto held = hold(address_, kind);
    const auto holder = holderOf(address_);
    EXPECT_EQ(holder.owner, Owner::kThisUser) << static_cast<int>(kind);
    EXPECT_EQ(holder.pid, kind == Kind::kListens ? ::getpid() : 0);
  }
}

// Connections that wait in a backlog bear the address, too, and count as root's: as this test's.
TEST_F(UnixAddressTest, IsAnotherUsersWhetherOrNotItAnswers) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs another user";
  }
  for (const Kind kind : {Kind::kListens, Kind::kBound, Kind::kFull}) {
    const Squatter squatter(address_, kind);
    EXPECT_EQ(holderOf(address_).owner, Owner::kAnotherUser) << static_cast<int>(kind);
  }
}

// No agent connects its claim.
TEST_F(UnixAddressTest, IsNobodysIfItsSocketIsConnected) {
  const auto held = hold(address_, Kind::kConnected);
  EXPECT_EQ(holderOf(address_).owner, Owner::kNobody);
}

TEST(UnixAddress, AsksAboutASocketThatDoesNotAnswer) {
  const auto address = abstractAddress("reft-test-asks-" + std::to_string(::getpid()));
  const auto another = [](const UnixAddress&) { return Owner::kAnotherUser; };
  for (const Kind kind : {Kind::kBound, Kind::kFull}) {
    const auto held = hold(address, kind);
    EXPECT_EQ(holderOf(address, another).owner, Owner::kAnotherUser);
  }
  const auto held = hold(address, Kind::kListens);
  EXPECT_EQ(holderOf(address, another).owner, Owner::kThisUser);
}

}  // namespace unix_address_test
}  // namespace reft::agent
