// Which process is at the other end of a Unix socket, so that the agent never watches, reads or
// signals another one that has its number by now, or in another PID namespace.
//
// Threads: re-entrant. Errors: none: what cannot be known is absent.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

struct PeerProcess {
  bool known = false;  // the kernel gave the credentials
  uid_t uid = 0;
  int pid = 0;  // in the agent's PID namespace; 0: not visible from it, or not certain
  // Readable at the end of the process, which may be in any PID namespace; empty: unknown, so that
  // only the end of the connection shows its end.
  UniqueFd pidfd;
  bool exact = false;  // the kernel itself named the process (Linux 6.5), not only its number

  // For kernels that gave only a number: forgets the process unless it has begun at `started`
  // (clock ticks since boot, as the peer read them; 0: unknown), because then another process has
  // the number by now.
  void confirm(int64_t started);
};

// The process that called connect(). Without `exact`, as on kernels before 6.5; for tests.
PeerProcess peerOf(int socket, bool exact = true);

// Whether a process has ended.
bool processEnded(const UniqueFd& pidfd);
// The exit status, as waitpid() gives it, of a process with this number that has ended; < 0: its
// parent has waited for it already, or it is unknown for another reason.
int exitStatusOf(const UniqueFd& pidfd, int pid);

}  // namespace reft::agent
