// Messages from a rank to itself, which gloo refuses. A send is buffered: it never waits for its
// recv.
//
// Matched by tag, first in first out. A recv-from-any does not match.
//
// Threads: any.
// Errors:  send and recv throw if the two tensors differ in bytes; a recv without a send throws
// from
//          wait() after its timeout.
#pragma once

#include <chrono>
#include <deque>
#include <map>

#include "c10d_backend/work.h"
#include "intercept/base/mutex.h"

namespace reft {

class Loopback {
 public:
  // A Work that is done once complete() ran.
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
  Mutex mutex_;
  // By tag: copies that wait for a recv, and recvs that wait for a send.
  std::map<int, std::deque<at::Tensor>> sent_ GUARDED_BY(mutex_);
  std::map<int, std::deque<c10::intrusive_ptr<Message>>> awaited_ GUARDED_BY(mutex_);
};

}  // namespace reft
