// A rank's connection to the agent of its node: one thread that receives, reconnects, and calls
// handlers.
//
// When the agent dies, the thread connects again (start_agent may start a new agent), greets it and
// hands over the vault, so a new agent receives every live vault. Unanswered votes are sent again.
//
// Threads: send(), putVault(), vote() and request() from any thread. Handlers run on
// `reft-agent-io`,
//          must not block and must not take the GIL. In a forked child no method does anything
//          (request() throws).
// Errors:  the constructor throws Timeout if no agent answers in time, Corruption if the listener
// is
//          not an agent, Unavailable if start_agent fails or the agent refuses. Later only
//          request() throws; connected() reports the state.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "intercept/base/mutex.h"
#include "intercept/link/wire.h"

namespace reft {

class AgentClient {
 public:
  using Handler = std::function<void(const wire::Frame&)>;

  struct Options {
    std::string socket_path;
    std::string hello;  // JSON payload of kHello
    std::chrono::milliseconds connect_timeout{10000};
    std::function<void()>
        start_agent;  // for local rank 0: called if no agent listens; may be empty
  };

  explicit AgentClient(Options options);
  ~AgentClient();  // sends nothing: a rank that ends cleanly sends kBye on what connection() gave

  // Register a type before its messages may arrive. A later call replaces the handler, and returns
  // when the old one has returned.
  void handle(wire::Type type, Handler handler);

  // Returns false if the connection is down; the message is then lost.
  bool send(wire::Type type, std::string_view payload);
  // Hands over the vault's descriptor now and after every reconnect. The client keeps a duplicate.
  void putVault(int fd, const std::string& payload);
  // Sends a message now, and the newest one of its type again after every reconnect.
  void keepSaying(wire::Type type, const std::string& payload);
  // Sends a vote, and again after each reconnect until the outcome of its step arrives.
  void vote(const wire::Ballot& ballot);
  // Sends and waits for a frame of type `answer`. Throws Timeout, PeerFailure.
  wire::Frame request(wire::Type type, std::string_view payload, wire::Type answer,
                      std::chrono::milliseconds timeout);
  // Leaves the agent for good, although others may still refer to this object: of two clients of a
  // rank, the agent would drop one for the other for ever. Idempotent; not for a handler.
  void close();
  // A duplicate of the connection, for a kBye when this object is gone; empty if not connected.
  UniqueFd connection() const;

  bool connected() const { return connected_.load(); }
  std::string welcome() const;  // JSON payload of the newest kWelcome

 private:
  void connectOnce(std::chrono::milliseconds timeout);
  bool greet(UniqueFd socket, std::chrono::milliseconds timeout);
  void run();
  void dispatch(wire::Frame frame);
  void setHandler(wire::Type type, Handler handler) EXCLUDES(mutex_);
  bool sendLocked(wire::Type type, std::string_view payload, int fd = -1) REQUIRES(mutex_);
  void disconnect() EXCLUDES(mutex_);
  // Of the thread `reft-agent-io`, which alone closes the socket; -1: not connected.
  int socket() const EXCLUDES(mutex_);
  // False in a forked child, which has no thread and must leave the connection alone.
  bool ownProcess() const;

  Options options_;
  const pid_t owner_;
  UniqueFd wake_;               // eventfd
  wire::FrameDecoder decoder_;  // of the newest connection; constructor, then `reft-agent-io` only

  // Held while a handler runs, so that handle() returns only after the old one. Before mutex_.
  Mutex dispatching_;
  mutable Mutex mutex_;
  ConditionVariable answered_;
  UniqueFd socket_ GUARDED_BY(mutex_);
  uint64_t connections_ GUARDED_BY(mutex_) = 0;  // made so far
  UniqueFd vault_ GUARDED_BY(mutex_);
  std::string vault_payload_ GUARDED_BY(mutex_);
  std::map<wire::Type, std::string> said_ GUARDED_BY(mutex_);  // by keepSaying()
  std::vector<wire::Ballot> open_votes_ GUARDED_BY(mutex_);
  std::map<wire::Type, Handler> handlers_ GUARDED_BY(mutex_);
  std::map<wire::Type, wire::Frame> answers_ GUARDED_BY(mutex_);
  std::map<wire::Type, int> waiting_ GUARDED_BY(mutex_);
  std::string welcome_ GUARDED_BY(mutex_);
  std::atomic<bool> connected_{false};  // written with mutex_ held
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace reft
