// Addresses of Unix sockets, and which user's process holds one.
//
// Any user may take any abstract name, so the name of an address is no proof of its owner.
//
// Threads: re-entrant. Errors: SystemError if there is no socket to ask with.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include <optional>
#include <string>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

struct UnixAddress {
  sockaddr_un name{};
  socklen_t bytes = sizeof(name);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

// In the abstract namespace. `name` has at most 107 bytes.
UnixAddress abstractAddress(const std::string& name);

UniqueFd streamSocket();

// The process that listens at `address`; nullopt and errno if none can be reached.
std::optional<ucred> listenerAt(const UnixAddress& address);

enum class Owner { kNobody, kThisUser, kAnotherUser, kUnknown };

// Whose socket has `address`, an abstract one, whether or not it listens: the kernel reports all
// sockets of the network namespace (sock_diag). kUnknown: this kernel does not report their users
// (before 5.3), or a sandbox hides them.
Owner ownerByKernel(const UnixAddress& address);

// The process that holds an abstract address.
struct Holder {
  Owner owner = Owner::kUnknown;
  pid_t pid = 0;  // 0: unknown
};

// A listener's credentials name it. `ask` decides about a socket that does not listen, or whose
// backlog is full.
Holder holderOf(const UnixAddress& address, Owner (*ask)(const UnixAddress&) = ownerByKernel);

}  // namespace reft::agent
