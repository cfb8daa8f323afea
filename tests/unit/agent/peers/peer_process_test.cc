#include "agent/peers/peer_process.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "intercept/base/proc_stat.h"

namespace reft::agent {

namespace peer_process_test {

// Both ends of a connection that this process made.
struct Pair {
  Pair() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    one.reset(ends[0]);
    other.reset(ends[1]);
  }
  UniqueFd one, other;
};

class PeerOfSocket : public ::testing::TestWithParam<bool> {};

TEST_P(PeerOfSocket, NamesTheProcessThatConnected) {
  const Pair pair;
  const auto peer = peerOf(pair.one.get(), GetParam());
  EXPECT_TRUE(peer.known);
  EXPECT_EQ(peer.uid, ::geteuid());
  EXPECT_EQ(peer.pid, ::getpid());
  ASSERT_TRUE(peer.pidfd);
  EXPECT_FALSE(processEnded(peer.pidfd));
}

INSTANTIATE_TEST_SUITE_P(Kernels, PeerOfSocket, ::testing::Bool());

TEST(PeerOfAnOldKernel, IsForgottenIfAnotherProcessHasItsNumber) {
  const Pair pair;
  const auto own = procStat(::getpid());
  ASSERT_TRUE(own && own->start_ticks > 0);
  auto peer = peerOf(pair.one.get(), false);
  peer.confirm(own->start_ticks);
  EXPECT_EQ(peer.pid, ::getpid());
  peer.confirm(0);  // the peer did not say
  EXPECT_EQ(peer.pid, ::getpid());
  peer.confirm(own->start_ticks - 1);
  EXPECT_EQ(peer.pid, 0);
  EXPECT_FALSE(peer.pidfd);
}

}  // namespace peer_process_test

}  // namespace reft::agent
