// A peer on the agent's socket: bytes in, frames out of a queue, never blocking; and all of them.
//
// Threads: the agent's loop only.
// Errors:  none: a broken peer is marked gone(). receive() throws Corruption for bytes that are no
// frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "agent/peers/peer_process.h"
#include "intercept/base/unique_fd.h"
#include "intercept/link/wire.h"

namespace reft::agent {

class Connection {
 public:
  static constexpr size_t kMaxQueued = 128u << 20;  // a peer with more is dropped
  static constexpr uint32_t kLongestHello = 512;    // payload of the first frame, in bytes
  static constexpr uint32_t kLongestOfTool = 64u << 10;

  Connection(uint64_t id, UniqueFd socket, PeerProcess process, int64_t now_ns);

  uint64_t id() const { return id_; }
  int fd() const { return socket_.get(); }
  PeerProcess& process() { return process_; }
  const PeerProcess& process() const { return process_; }

  // Takes the peer for what its hello says: `rank` -1 for a tool.
  void greet(int rank);
  bool greeted() const { return greeted_; }
  int rank() const { return rank_; }  // -1: a tool, or not greeted yet

  // Whether bytes wait to be read.
  bool hasBytes() const;
  // Reads once; false at end of stream. Descriptors are taken from ranks alone.
  bool receive(int64_t now_ns);
  std::optional<wire::Frame> next() { return decoder_.next(); }
  // A tool that has sent more than the agent takes from it at a time.
  bool full() const {
    return greeted_ && rank_ < 0 && decoder_.waiting() >= sizeof(wire::Header) + kLongestOfTool;
  }

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

  // When it came, or last sent something after its hello.
  int64_t heardNs() const { return heard_ns_; }
  // For how long it has taken nothing of what is queued for it; 0: nothing is queued, or it did
  // since the last call.
  int64_t stalledNs(int64_t now_ns);

 private:
  struct Out {
    std::string bytes;
    size_t sent = 0;
    UniqueFd fd;
  };
  void enqueue(std::string bytes, int fd);

  uint64_t id_;
  UniqueFd socket_;
  PeerProcess process_;
  int64_t heard_ns_;
  bool greeted_ = false;
  int rank_ = -1;
  uint64_t sent_bytes_ = 0, sent_bytes_before_ = 0;
  int64_t stalled_since_ns_ = 0;  // 0: not stalled
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
