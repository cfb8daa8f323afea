// A PeerTransport between the threads of one process. A send is done when its receive has taken the
// bytes, as with gloo: code that waits in the wrong order hangs here, too.
//
// Threads: one hub for all ranks; each rank's transport from one thread at a time. Errors: Timeout
// when the other side does not come within the hub's limit.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "intercept/base/error.h"
#include "snapshot/peer_transport.h"

namespace reft {

class InProcessHub {
 public:
  explicit InProcessHub(std::chrono::milliseconds limit = std::chrono::seconds(20))
      : limit_(limit) {}

  std::unique_ptr<PeerTransport> transport(int rank) {
    return std::make_unique<Transport>(*this, rank);
  }

  size_t longest() {  // message so far
    const std::lock_guard lock(mutex_);
    return longest_;
  }

 private:
  using Route = std::tuple<int, int, uint32_t>;  // from, to, tag
  struct Message {
    std::span<const std::byte> sent;
    std::span<std::byte> wanted;
    bool has_sender = false, has_receiver = false, done = false;
  };

  std::shared_ptr<Message> post(const Route& route, bool sends, std::span<const std::byte> sent,
                                std::span<std::byte> wanted) {
    const std::lock_guard lock(mutex_);
    auto& queue = routes_[route];
    for (const auto& message : queue) {
      if (sends ? !message->has_sender : !message->has_receiver) {
        return fill(message, sends, sent, wanted);
      }
    }
    queue.push_back(std::make_shared<Message>());
    return fill(queue.back(), sends, sent, wanted);
  }
  std::shared_ptr<Message> fill(const std::shared_ptr<Message>& message, bool sends,
                                std::span<const std::byte> sent, std::span<std::byte> wanted) {
    if (sends) {
      longest_ = std::max(longest_, sent.size());
      message->sent = sent;
      message->has_sender = true;
    } else {
      message->wanted = wanted;
      message->has_receiver = true;
    }
    if (message->has_sender && message->has_receiver) {
      if (message->sent.size() != message->wanted.size()) {
        throw PeerFailure("sizes differ: " + std::to_string(message->sent.size()) + " sent, " +
                          std::to_string(message->wanted.size()) + " wanted");
      }
      std::memcpy(message->wanted.data(), message->sent.data(), message->sent.size());
      message->done = true;
      arrived_.notify_all();
    }
    return message;
  }
  void wait(const Message& message) {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, limit_, [&] { return message.done; })) {
      throw Timeout("in-process message");
    }
  }

  class Transport final : public PeerTransport {
   public:
    Transport(InProcessHub& hub, int rank) : hub_(hub), rank_(rank) {}
    std::unique_ptr<Pending> send(std::span<const std::byte> bytes, int to, uint32_t tag) override {
      return std::make_unique<OneMessage>(hub_, hub_.post({rank_, to, tag}, true, bytes, {}));
    }
    std::unique_ptr<Pending> receive(std::span<std::byte> bytes, int from, uint32_t tag) override {
      return std::make_unique<OneMessage>(hub_, hub_.post({from, rank_, tag}, false, {}, bytes));
    }

   private:
    struct OneMessage final : Pending {
      OneMessage(InProcessHub& hub, std::shared_ptr<Message> message)
          : hub_(hub), message_(std::move(message)) {}
      void wait() override { hub_.wait(*message_); }
      InProcessHub& hub_;
      std::shared_ptr<Message> message_;
    };
    InProcessHub& hub_;
    const int rank_;
  };

  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  size_t longest_ = 0;
  std::map<Route, std::deque<std::shared_ptr<Message>>> routes_;
};

}  // namespace reft
