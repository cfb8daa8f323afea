#include "agent/serve/metrics_http.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "intercept/base/clock.h"

namespace reft::agent {

namespace metrics_http_test {

int freePort() {
  const UniqueFd probe(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(where);
  ::bind(probe.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where));
  ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&where), &bytes);
  return ntohs(where.sin_port);
}

class MetricsHttpTest : public ::testing::Test {
 protected:
  UniqueFd client(const std::string& request) const {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(port));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)), 0);
    EXPECT_EQ(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    return socket;
  }
  void serve(int passes) {
    for (int i = 0; i < passes; ++i) {
      http.serve(now_ns);
    }
  }
  static bool answered(const UniqueFd& socket) {
    char byte;
    return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 1;
  }

  int port = freePort();
  int texts = 0;
  int64_t now_ns = kSecond;
  MetricsHttp http{port, [this] {
                     ++texts;
                     return std::string("reft 1\n");
                   }};
};

TEST_F(MetricsHttpTest, OneTextServesAllThatAskWithinASecond) {
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 6; ++i) {
    clients.push_back(client("GET /metrics HTTP/1.1\r\n\r\n"));
  }
  serve(50);
  for (const auto& socket : clients) {
    EXPECT_TRUE(answered(socket));
  }
  EXPECT_EQ(texts, 1);
  now_ns += 2 * kSecond;
  http.tick(now_ns);
  const auto later = client("GET / HTTP/1.1\r\n\r\n");
  serve(20);
  EXPECT_TRUE(answered(later));
  EXPECT_EQ(texts, 2);
}

TEST_F(MetricsHttpTest, ATickTakesFewConnections) {
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(client("GET /metrics HTTP/1.1\r\n\r\n"));
  }
  const auto count = [&] {
    int found = 0;
    for (const auto& socket : clients) {
      char byte;
      found += ::recv(socket.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1;
    }
    return found;
  };
  serve(100);
  EXPECT_EQ(count(), 8);
  http.tick(now_ns);
  serve(100);
  EXPECT_EQ(count(), 12);
}

TEST_F(MetricsHttpTest, SilentClientsAreDroppedAtTheirDeadline) {
  std::vector<UniqueFd> quiet;
  for (int i = 0; i < 16; ++i) {
    quiet.push_back(client("GET"));
  }
  serve(50);
  http.tick(now_ns);
  serve(50);
  const auto patient = client("GET /metrics HTTP/1.1\r\n\r\n");
  http.tick(now_ns);
  serve(50);
  EXPECT_FALSE(answered(patient));
  now_ns += 6 * kSecond;
  http.tick(now_ns);
  serve(50);
  EXPECT_TRUE(answered(patient));
}

}  // namespace metrics_http_test

}  // namespace reft::agent
