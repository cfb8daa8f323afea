#include "agent/unix_address.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "intercept/base/error.h"

namespace reft::agent {

namespace {

// Of a socket, as the kernel numbers them for sockets of all families (linux/tcp_states.h).
constexpr uint32_t kUnconnected = 1u << 7;
constexpr uint32_t kListening = 1u << 10;

// sock_diag about stream sockets of the Unix domain that may have a claim. Those of connections are
// left out: they bear their listener's address, and until they are accepted belong to no user.
struct Question {
  nlmsghdr header{};
  unix_diag_req request{};
};

Question question() {
  Question result;
  result.header.nlmsg_len = sizeof(result);
  result.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  result.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  result.request.sdiag_family = AF_UNIX;
  result.request.udiag_states = kUnconnected | kListening;
  result.request.udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_UID;
  return result;
}

// What one answer says about the socket at `name`.
struct Entry {
  bool is_there = false;
  std::optional<uid_t> user;
};

Entry entryOf(const nlmsghdr* message, std::string_view name) {
  Entry entry;
  const auto* socket = static_cast<const unix_diag_msg*>(NLMSG_DATA(message));
  if (message->nlmsg_len < NLMSG_LENGTH(sizeof(*socket)) || socket->udiag_type != SOCK_STREAM) {
    return entry;
  }
  auto left = static_cast<int>(message->nlmsg_len - NLMSG_LENGTH(sizeof(*socket)));
  const auto* attribute = reinterpret_cast<const rtattr*>(socket + 1);
  for (; RTA_OK(attribute, left); attribute = RTA_NEXT(attribute, left)) {
    const auto* data = static_cast<const char*>(RTA_DATA(attribute));
    const size_t bytes = RTA_PAYLOAD(attribute);
    if (attribute->rta_type == UNIX_DIAG_NAME) {
      entry.is_there = std::string_view(data, bytes) == name;
    } else if (attribute->rta_type == UNIX_DIAG_UID && bytes == sizeof(uint32_t)) {
      uint32_t user = 0;
      std::memcpy(&user, data, sizeof(user));
      entry.user = user;
    }
  }
  return entry;
}

// Whether the kernel has ended its answer without an error.
bool isComplete(const nlmsghdr* done) {
  int32_t code = 0;
  if (done->nlmsg_len >= NLMSG_LENGTH(sizeof(code))) {
    std::memcpy(&code, NLMSG_DATA(done), sizeof(code));
  }
  return code >= 0;
}

}  // namespace

UnixAddress abstractAddress(const std::string& name) {
  UnixAddress result;
  result.name.sun_family = AF_UNIX;
  const size_t bytes = std::min(name.size(), sizeof(result.name.sun_path) - 1);
  std::memcpy(result.name.sun_path + 1, name.data(), bytes);
  result.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return result;
}

UniqueFd streamSocket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw SystemError("socket");
  }
  return socket;
}

std::optional<ucred> listenerAt(const UnixAddress& address) {
  const auto socket = streamSocket();
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (::connect(socket.get(), address.get(), address.bytes) != 0 ||
      ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return std::nullopt;
  }
  return peer;
}

Owner ownerByKernel(const UnixAddress& address) {
  const UniqueFd kernel(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  const auto ask = question();
  if (!kernel || ::send(kernel.get(), &ask, sizeof(ask), MSG_DONTWAIT) != sizeof(ask)) {
    return Owner::kUnknown;
  }
  const std::string_view name(address.name.sun_path,
                              address.bytes - offsetof(sockaddr_un, sun_path));
  auto owner = Owner::kNobody;
  std::vector<uint32_t> buffer(16'384);  // aligned as messages are, and larger than the kernel's
  while (true) {
    const ssize_t got =
        ::recv(kernel.get(), buffer.data(), buffer.size() * sizeof(buffer[0]), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {  // the kernel has all answers ready, so it does not have this one
      return Owner::kUnknown;
    }
    auto left = static_cast<uint32_t>(got);
    const auto* message = reinterpret_cast<const nlmsghdr*>(buffer.data());
    for (; NLMSG_OK(message, left); message = NLMSG_NEXT(message, left)) {
      if (message->nlmsg_type == NLMSG_DONE) {
        return isComplete(message) ? owner : Owner::kUnknown;
      }
      if (message->nlmsg_type != SOCK_DIAG_BY_FAMILY) {
        return Owner::kUnknown;
      }
      const auto entry = entryOf(message, name);
      if (!entry.is_there) {
        continue;
      }
      if (!entry.user) {
        return Owner::kUnknown;
      }
      if (*entry.user == ::geteuid()) {
        return Owner::kThisUser;
      }
      owner = Owner::kAnotherUser;
    }
  }
}

Holder holderOf(const UnixAddress& address, Owner (*ask)(const UnixAddress&)) {
  if (const auto peer = listenerAt(address)) {
    return {peer->uid == ::geteuid() ? Owner::kThisUser : Owner::kAnotherUser, peer->pid};
  }
  return {ask(address), 0};
}

}  // namespace reft::agent
