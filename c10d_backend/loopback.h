// Messages from a rank to itself, which gloo refuses. A send is buffered: it never waits for its
// recv.
//
// Matched by tag, first in first out. Not matched by recv-from-any.
//
// Threads: any.
// Errors:  send and recv throw if shape or dtype of the pair differ in bytes; a recv that nobody
// answers throws from wait
//          after its timeout.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <mutex>

#include "c10d_backend/work.h"

namespace reft {

class Loopback {
 public:
  // A Work that is over when complete() says so.
  class Message final : public c10d::Work {
   public:
    Message(int rank, c10d::OpType type, at::Tensor tensor, std::chrono::milliseconds timeout)
        : Work(rank, type), tensor_(std::move(tensor)), timeout_(timeout) {}
    void complete(std::exception_ptr failure = nullptr);
    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    int sourceRank() const override { return rank_; }
    const at::Tensor& tensor() const { return tensor_; }

   private:
    at::Tensor tensor_;
    const std::chrono::milliseconds timeout_;
  };

  explicit Loopback(int rank) : rank_(rank) {}

  WorkPtr send(const at::Tensor& tensor, int tag);
  // `timeout`: how long a wait without an own timeout waits.
  WorkPtr recv(const at::Tensor& tensor, int tag, std::chrono::milliseconds timeout);

 private:
  const int rank_;
  std::mutex mutex_;
  std::map<int, std::deque<at::Tensor>> sent_;                      // copies, waiting for a recv
  std::map<int, std::deque<c10::intrusive_ptr<Message>>> awaited_;  // recvs, waiting for a send
};

}  // namespace reft
