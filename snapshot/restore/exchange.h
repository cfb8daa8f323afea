// Parts of a snapshot between the ranks of a job, in messages of bounded size, several under way.
//
// All ranks call send() and receive() in the order of transfersOf(). Each waits for its oldest
// message before it posts one too many, so the first message that is not done is always posted on
// both sides.
//
// Threads: one at a time. Errors: Unavailable without a transport; those of the transport, and of
// what fills and takes, as they come. The exchange is then of no further use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>

#include "snapshot/peer_transport.h"
#include "snapshot/restore/live_writer.h"

namespace reft {

class Exchange {
 public:
  static constexpr size_t kUnderWay = 16;  // messages at a time

  // Gives, or takes, the bytes of a part from `begin` on. Those of one part are taken in order.
  using Fill = std::function<void(uint64_t begin, std::span<std::byte> bytes)>;
  using Take = std::function<void(uint64_t begin, std::span<const std::byte> bytes)>;

  // `message_bytes`: how long messages are at most, the same on all ranks.
  Exchange(PeerTransport* transport, uint64_t message_bytes)
      : transport_(transport), message_bytes_(message_bytes) {}

  void send(int to, uint32_t tag, uint64_t bytes, const Fill& fill);
  // `take` must stay valid until finish() has returned.
  void receive(int from, uint32_t tag, uint64_t bytes, const Take& take);
  // Waits for all messages.
  void finish();

 private:
  struct Message {
    HostBuffer buffer;
    uint64_t begin = 0, bytes = 0;  // of the part
    const Take* take = nullptr;     // nullptr: it was sent
    std::unique_ptr<PeerTransport::Pending> pending;
  };
  // Calls `post` for each message of a part, which fills it or not, and sets `pending`.
  void postAll(uint64_t bytes, const std::function<void(Message& message)>& post);
  void landOldest();

  PeerTransport* transport_;
  uint64_t message_bytes_;
  std::deque<Message> messages_;
};

}  // namespace reft
