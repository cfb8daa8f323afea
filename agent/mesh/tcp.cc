#include "agent/mesh/tcp.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>

#include "intercept/base/error.h"

namespace reft::agent::tcp {

namespace {

constexpr unsigned kUserTimeoutMs = 10000;
constexpr int kKeepAliveSec = 5;
constexpr int kBacklog = 64;

struct AddressInfo {
  addrinfo* first = nullptr;
  ~AddressInfo() {
    if (first != nullptr) {
      ::freeaddrinfo(first);
    }
  }
};

void resolve(const std::string& address, uint16_t port, bool listen, AddressInfo& found) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | (listen ? AI_PASSIVE : 0);
  const int failed =
      ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found.first);
  if (failed != 0) {
    throw Unavailable("mesh address '" + address + "': " + ::gai_strerror(failed));
  }
}

UniqueFd socketFor(const AddressInfo& info) {
  UniqueFd socket(::socket(info.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw SystemError("a socket of the mesh");
  }
  return socket;
}

}  // namespace

UniqueFd listenAt(const std::string& address, uint16_t port) {
  AddressInfo info;
  resolve(address, port, true, info);
  UniqueFd socket = socketFor(info);
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(socket.get(), info.first->ai_addr, info.first->ai_addrlen) != 0) {
    throw SystemError("binding the mesh to " + address + " port " + std::to_string(port));
  }
  if (::listen(socket.get(), kBacklog) != 0) {
    throw SystemError("listening for the mesh");
  }
  return socket;
}

UniqueFd connectTo(const std::string& address, uint16_t port) {
  AddressInfo info;
  resolve(address, port, false, info);
  UniqueFd socket = socketFor(info);
  tune(socket.get());
  if (::connect(socket.get(), info.first->ai_addr, info.first->ai_addrlen) != 0 &&
      errno != EINPROGRESS) {
    throw SystemError("connecting");
  }
  return socket;
}

uint16_t portOf(int socket) {
  sockaddr_storage at{};
  socklen_t bytes = sizeof(at);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&at), &bytes) != 0) {
    throw SystemError("getsockname");
  }
  return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(at).sin6_port
                                        : reinterpret_cast<const sockaddr_in&>(at).sin_port);
}

void limitRate(int socket, uint64_t rate) {
  const uint64_t most = rate == 0 ? ~uint64_t{0} : rate;
  ::setsockopt(socket, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof(most));
}

void tune(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepAliveSec, sizeof(kKeepAliveSec));
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepAliveSec, sizeof(kKeepAliveSec));
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
}

}  // namespace reft::agent::tcp
