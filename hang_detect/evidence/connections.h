// TCP connections of a rank's process, from /proc: whose other side no longer acknowledges what the
// kernel sends.
//
// A process that does not read closes its window, and the kernel then asks from time to time; only
// if nothing comes back at all does it send the same data again and again. So a connection is
// *dead* if its oldest data were sent again several times, one after the other: the path or the
// other host is at fault, and no process.
//
// Threads: free functions, re-entrant. Errors: none: what cannot be read is unknown.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

struct DeadConnection {
  std::string local;           // "10.0.0.2:41234", "[fd00::2]:41234"
  std::string peer;            // the same
  int64_t unacknowledged = 0;  // bytes
  int resent = 0;              // times in a row; the pause doubles each time
};

struct Connections {
  std::vector<std::string> addresses;  // own side of each, each once; at most 512
  std::vector<DeadConnection> dead;    // at most 64
};

// Of all established connections that the process has open.
Connections connectionsOf(int pid) noexcept;

// One line of /proc/<pid>/net/tcp or tcp6.
struct TcpLine {
  DeadConnection connection;  // `resent` is 0 unless the kernel waits to send again
  uint64_t inode = 0;
};
// False if the line is none of an established connection.
bool parseTcpLine(std::string_view line, TcpLine& parsed);

}  // namespace reft
