// TCP sockets of the mesh, which never block. Addresses are numeric: no name is looked up.
//
// Threads: re-entrant. Errors: Unavailable for an address that is none, SystemError for what the
// kernel refuses.
#pragma once

#include <cstdint>
#include <string>

#include "intercept/base/unique_fd.h"

namespace reft::agent::tcp {

// `port` 0: any that is free.
UniqueFd listenAt(const std::string& address, uint16_t port);
// Begins to connect: the socket can be written to once the other side has answered.
UniqueFd connectTo(const std::string& address, uint16_t port);
uint16_t portOf(int socket);
// Bytes per second that it sends; 0: no limit.
void limitRate(int socket, uint64_t rate);
// Small messages go at once, and a peer that is gone without a word is noticed in seconds.
void tune(int socket);

}  // namespace reft::agent::tcp
