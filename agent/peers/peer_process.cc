#include "agent/peers/peer_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "hang_detect/evidence/ending.h"
#include "intercept/base/proc_stat.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace reft::agent {

PeerProcess peerOf(int socket, bool exact) {
  PeerProcess peer;
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return peer;
  }
  peer.known = true;
  peer.uid = credentials.uid;
  int pidfd = -1;
  length = sizeof(pidfd);
  if (exact && ::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) {
    peer.pidfd.reset(pidfd);
    peer.exact = true;
  } else if (credentials.pid > 0) {
    peer.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)));
  }
  // The number belongs to this process as long as its descriptor says that it has not ended.
  peer.pid = peer.pidfd && !processEnded(peer.pidfd) ? credentials.pid : 0;
  return peer;
}

void PeerProcess::confirm(int64_t started) {
  if (exact || started == 0 || pid == 0) {
    return;
  }
  const auto stat = procStat(pid);
  if (!stat || stat->start_ticks != started) {
    pid = 0;
    pidfd.reset();
  }
}

int exitStatusOf(const UniqueFd& pidfd, int pid) {
  if (!pidfd || pid <= 0 || !processEnded(pidfd)) {
    return -1;
  }
  const int status = reft::exitStatusOf(pid);
  // Another process may have the number by now: the descriptor's own has "-1" then.
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(pidfd.get()));
  for (std::string field; status >= 0 && info >> field;) {
    int number = -1;
    if (field == "Pid:" && info >> number && number == pid) {
      return status;
    }
  }
  return -1;
}

bool processEnded(const UniqueFd& pidfd) {
  pollfd poller{pidfd.get(), POLLIN, 0};
  return ::poll(&poller, 1, 0) > 0;
}

}  // namespace reft::agent
