// Serves the metrics text over HTTP on 127.0.0.1, for Prometheus.
//
// Anybody on this host can connect, so what that costs is bounded: one request a connection, a few
// connections a tick, each for seconds at most, and one text for all that ask within a second.
//
// Threads: the agent's loop only. It never blocks.
// Errors:  none: a port that is taken is logged, and nothing is served.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

class MetricsHttp {
 public:
  // `port` 0: serves nothing. `text`: called for each request.
  MetricsHttp(int port, std::function<std::string()> text);

  // Readable when serve() has something to do; -1 if nothing is served.
  int fd() const { return epoll_.get(); }
  void serve(int64_t now_ns);
  // Drops clients that take too long, and lets new ones come. Call each tick.
  void tick(int64_t now_ns);

 private:
  struct Client {
    UniqueFd socket;
    std::string in, out;
    int64_t deadline_ns = 0;
  };
  bool listen(int port);
  void watch(int fd, uint64_t token, bool write, bool add);
  void accept(int64_t now_ns);
  // Takes no more connections until the next tick.
  void pause();
  // False: the client is done.
  bool serve(uint64_t token, Client& client, int64_t now_ns);
  const std::string& text(int64_t now_ns);

  std::function<std::string()> text_;
  std::string newest_text_;
  int64_t newest_text_ns_ = 0;  // 0: none yet
  UniqueFd epoll_, listener_;
  std::map<uint64_t, Client> clients_;
  uint64_t next_token_ = 1;
  int accepts_left_ = 0;  // until the next tick
  bool paused_ = false;
};

}  // namespace reft::agent
