#include "hang_detect/evidence/connections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "intercept/base/unique_fd.h"

namespace reft {
namespace connections_test {

using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(TcpLine, OfAConnectionThatSendsAgain) {
  TcpLine line;
  ASSERT_TRUE(
      parseTcpLine("   3: 0207E70A:A2C4 0307E70A:1F90 01 0012D687:00000000 01:00000A2B "
                   "00000007  1000        0 4242 2 ffff8881 20 4 31 10 -1",
                   line));
  EXPECT_EQ(line.connection.local, "10.231.7.2:41668");
  EXPECT_EQ(line.connection.peer, "10.231.7.3:8080");
  EXPECT_EQ(line.connection.unacknowledged, 0x12D687);
  EXPECT_EQ(line.connection.resent, 7);
  EXPECT_EQ(line.inode, 4242u);
}

TEST(TcpLine, APeerThatDoesNotReadIsNotDead) {
  TcpLine line;
  // Timer 4 asks for the window of a peer whose process does not read.
  ASSERT_TRUE(
      parseTcpLine("3: 0207E70A:A2C4 0307E70A:1F90 01 0012D687:00000000 04:00000A2B "
                   "00000009 1000 0 4242 2 ffff8881 20 4 31 10 -1",
                   line));
  EXPECT_EQ(line.connection.resent, 0);
  ASSERT_TRUE(
      parseTcpLine("3: 0207E70A:A2C4 0307E70A:1F90 01 00000000:00000000 00:00000000 "
                   "00000000 1000 0 4242 2 ffff8881 20 4 31 10 -1",
                   line));
  EXPECT_EQ(line.connection.resent, 0);
}

TEST(TcpLine, OfVersion6) {
  TcpLine line;
  const std::string rest = " 01 00000010:00000000 01:00000000 00000004 0 0 7 1";
  EXPECT_FALSE(
      parseTcpLine("0: 0000000000000000FFFF00000207E70A:A2C4 "
                   "000000000000000000000000010000:0001" +
                       rest,
                   line));
  ASSERT_TRUE(
      parseTcpLine("0: 0000000000000000FFFF00000207E70A:A2C4 "
                   "00000000000000000000000001000000:0001" +
                       rest,
                   line));
  EXPECT_EQ(line.connection.local, "10.231.7.2:41668");  // as the table of version 4 has it
  EXPECT_EQ(line.connection.peer, "[::1]:1");
}

TEST(TcpLine, WhatIsNoneIsRefused) {
  TcpLine line;
  for (const char* text :
       {"", "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid",
        "0: 0207E70A:A2C4 0307E70A:1F90 0A 00000000:00000000 00:00000000 00000000 0 0 1 1",
        "0: 0207E70:A2C4 0307E70A:1F90 01 00000000:00000000 00:00000000 00000000 0 0 1 1",
        "0: 0207E70A:A2C4 0307E70A:1F90 01 0000000G:00000000 00:00000000 00000000 0 0 1 1",
        "0: 0207E70A:A2C4 0307E70A:1F90 01 00000000:00000000 00:00000000 00000000 0 0 -1 1",
        "0: 0207E70A:A2C4 0307E70A:1F90 01 00000000:00000000 00:00000000"}) {
    EXPECT_FALSE(parseTcpLine(text, line)) << text;
  }
}

TEST(Connections, OfThisProcess) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string own = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  EXPECT_THAT(connectionsOf(::getpid()).addresses, Not(Contains(own)));  // no client yet
  const UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  const UniqueFd server(::accept(listener.get(), nullptr, nullptr));
  ASSERT_TRUE(server);
  const Connections found = connectionsOf(::getpid());
  EXPECT_THAT(found.addresses, Contains(own));
  EXPECT_THAT(found.dead, IsEmpty());
  EXPECT_THAT(connectionsOf(0).addresses, IsEmpty());
}

}  // namespace connections_test
}  // namespace reft
