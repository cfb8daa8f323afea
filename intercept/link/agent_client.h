// A rank's connection to the agent of its node: one thread that receives, reconnects, and calls
// handlers.
//
// When the agent dies, the thread connects again (the restart hook may start a new agent), says
// hello and hands over what was put() before, so a new agent ends up with every live vault. Votes
// that were not answered are sent again.
//
// Threads: send(), put(), request() from any thread. Handlers run on `reft-agent-io`, must not
// block and must not take the GIL. Errors:  the constructor throws Timeout or Corruption if no
// agent answers in time, or what answers is not one, Unavailable if
//          start_agent cannot start one or the agent refuses. Later only request() throws:
//          connected() says how it is. In a forked child every method does nothing (request()
//          throws).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "intercept/link/wire.h"

namespace reft {

class AgentClient {
 public:
  using Handler = std::function<void(const wire::Frame&)>;

  struct Options {
    std::string socket_path;
    std::string hello;  // JSON payload of kHello
    std::chrono::milliseconds connect_timeout{10000};
    std::function<void()> start_agent;  // called when nobody listens (local rank 0), may be empty
  };

  explicit AgentClient(Options options);
  ~AgentClient();  // says nothing: a rank that ends cleanly says good-bye on what connection() gave

  // Registers before messages of that type may arrive; later calls replace, and return when the old
  // handler has returned.
  void handle(wire::Type type, Handler handler);

  // Sends or queues; returns false if the connection is down (the message is lost unless it is a
  // vote).
  bool send(wire::Type type, std::string_view payload);
  // Hands over the vault's descriptor now and after every reconnect. The client keeps a duplicate.
  void putVault(int fd, const std::string& payload);
  // Sends a vote; repeated after a reconnect until an outcome for its step arrived.
  void vote(const wire::Ballot& ballot);
  // Sends and waits for a frame of type `answer`. Throws Timeout, PeerFailure.
  wire::Frame request(wire::Type type, std::string_view payload, wire::Type answer,
                      std::chrono::milliseconds timeout);
  // A duplicate of the connection, to say good-bye on it when this object is gone; none if there is
  // no connection.
  UniqueFd connection() const;

  bool connected() const { return connected_.load(); }
  uint64_t reconnects() const { return reconnects_.load(); }
  std::string welcome() const;  // JSON payload of the newest kWelcome

 private:
  void connectOnce(std::chrono::milliseconds timeout);
  bool greet(UniqueFd socket, std::chrono::milliseconds timeout);
  void run();
  void dispatch(wire::Frame frame);

  bool sendLocked(wire::Type type, std::string_view payload, int fd = -1);
  void disconnect();
  bool ownProcess()
      const;  // false in a forked child, which has no thread and must leave the connection alone

  Options options_;
  const pid_t owner_;
  std::mutex dispatching_;  // held while a handler runs, so that handle() returns only when the old
                            // one is done
  wire::FrameDecoder decoder_;  // of the newest connection; constructor, then `reft-agent-io` only
  mutable std::mutex mutex_;
  std::condition_variable answered_;
  UniqueFd socket_;
  UniqueFd wake_;  // eventfd
  UniqueFd vault_;
  std::string vault_payload_;
  std::vector<wire::Ballot> open_votes_;
  std::map<wire::Type, Handler> handlers_;
  std::map<wire::Type, wire::Frame> answers_;
  std::map<wire::Type, int> waiting_;
  std::string welcome_;
  std::atomic<bool> connected_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> reconnects_{0};
  std::thread thread_;
};

}  // namespace reft
