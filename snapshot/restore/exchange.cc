#include "snapshot/restore/exchange.h"

#include <algorithm>
#include <utility>

#include "intercept/base/error.h"

namespace reft {

void Exchange::postAll(uint64_t bytes, const std::function<void(Message& message)>& post) {
  if (bytes > 0 && transport_ == nullptr) {
    throw Unavailable("parts of the snapshot lie on other nodes, and there is no transport");
  }
  for (uint64_t begin = 0; begin < bytes; begin += message_bytes_) {
    if (messages_.size() == kUnderWay) {
      landOldest();
    }
    const uint64_t length = std::min(message_bytes_, bytes - begin);
    Message message{hostBuffer(length), begin, length, nullptr, nullptr};
    post(message);
    messages_.push_back(std::move(message));
  }
}

void Exchange::send(int to, uint32_t tag, uint64_t bytes, const Fill& fill) {
  postAll(bytes, [&](Message& message) {
    const std::span<std::byte> buffer(message.buffer.get(), message.bytes);
    fill(message.begin, buffer);
    message.pending = transport_->send(buffer, to, tag);
  });
}

void Exchange::receive(int from, uint32_t tag, uint64_t bytes, const Take& take) {
  postAll(bytes, [&](Message& message) {
    message.take = &take;
    message.pending = transport_->receive({message.buffer.get(), message.bytes}, from, tag);
  });
}

void Exchange::landOldest() {
  const Message& oldest = messages_.front();
  oldest.pending->wait();
  if (oldest.take != nullptr) {
    (*oldest.take)(oldest.begin, {oldest.buffer.get(), oldest.bytes});
  }
  messages_.pop_front();
}

void Exchange::finish() {
  while (!messages_.empty()) {
    landOldest();
  }
}

}  // namespace reft
