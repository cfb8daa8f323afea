// A peer on the agent's socket: bytes in, frames out of a queue, never blocking; and all of them.
//
// Threads: the agent's loop only.
// Errors:  none: a broken peer is marked gone(). receive() throws Corruption for bytes that are no
// frames.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "intercept/base/unique_fd.h"
#include "intercept/link/wire.h"

namespace reft::agent {

class Connection {
 public:
  static constexpr size_t kMaxQueued = 128u << 20;  // a peer with more is dropped

  Connection(uint64_t id, UniqueFd socket, pid_t pid)
      : id_(id), pid_(pid), socket_(std::move(socket)) {}

  uint64_t id() const { return id_; }
  int fd() const { return socket_.get(); }
  pid_t pid() const { return pid_; }  // from the kernel; 0: another pid namespace

  // Reads once; false at end of stream.
  bool receive();
  std::optional<wire::Frame> next() { return decoder_.next(); }

  // Queues and sends what the socket takes. `fd` is duplicated.
  void send(wire::Type type, std::string_view payload, int fd = -1);
  void send(wire::Type type, const wire::Ballot& ballot);
  void flush();
  bool wantsWrite() const { return !queue_.empty(); }

  // No more reading; gone() as soon as the queue is sent.
  void closeAfterFlush() { closing_ = true; }
  bool closing() const { return closing_; }
  void drop() { gone_ = true; }
  bool gone() const { return gone_ || (closing_ && queue_.empty()); }

  // Set by the agent after a good hello.
  bool greeted = false;
  int rank = -1;  // -1: a tool

 private:
  struct Out {
    std::string bytes;
    size_t sent = 0;
    UniqueFd fd;
  };
  void enqueue(std::string bytes, int fd);

  uint64_t id_;
  pid_t pid_;
  UniqueFd socket_;
  wire::FrameDecoder decoder_;
  std::deque<Out> queue_;
  size_t queued_bytes_ = 0;
  bool closing_ = false;
  bool gone_ = false;
};

// The open connections by id.
class Connections {
 public:
  void add(std::unique_ptr<Connection> connection) {
    const auto id = connection->id();
    all_.emplace(id, std::move(connection));
  }
  // nullptr if it is closed, or `id` is 0.
  Connection* find(uint64_t id) {
    const auto found = all_.find(id);
    return found == all_.end() ? nullptr : found->second.get();
  }
  size_t size() const { return all_.size(); }
  std::map<uint64_t, std::unique_ptr<Connection>>& all() { return all_; }

 private:
  std::map<uint64_t, std::unique_ptr<Connection>> all_;
};

}  // namespace reft::agent
