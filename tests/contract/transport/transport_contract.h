// What every PeerTransport does, as one of the ranks that take part sees it: the in-process fake
// and the one over gloo run the same cases.
//
// Threads: each rank's part on a thread of its own. Errors: std::runtime_error for a broken
// promise.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "snapshot/peer_transport.h"

namespace reft::transport_contract {

using Bytes = std::vector<std::byte>;

// Contents that tell message, sender and place apart.
inline Bytes message(int from, uint32_t tag, size_t size) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((i * 31 + tag * 7 + static_cast<size_t>(from) * 101) & 0xff);
  }
  return bytes;
}

inline void expectMessage(const Bytes& found, int from, uint32_t tag) {
  if (found != message(from, tag, found.size())) {
    throw std::runtime_error("message " + std::to_string(tag) + " of rank " + std::to_string(from) +
                             " arrived with other contents");
  }
}

// Around a ring, all under way before the first is waited for.
inline void manyInFlight(PeerTransport& transport, int rank, int world) {
  constexpr uint32_t kMessages = 16;
  const int next = (rank + 1) % world, before = (rank + world - 1) % world;
  std::vector<Bytes> sent, received;
  std::vector<std::unique_ptr<PeerTransport::Pending>> pending;
  for (uint32_t tag = 0; tag < kMessages; ++tag) {
    sent.push_back(message(rank, tag, 1 + tag * 1000));
    received.emplace_back(1 + tag * 1000);
  }
  for (uint32_t tag = 0; tag < kMessages; ++tag) {
    pending.push_back(transport.receive(received[tag], before, tag));
    pending.push_back(transport.send(sent[tag], next, tag));
  }
  for (const auto& one : pending) {
    one->wait();
  }
  for (uint32_t tag = 0; tag < kMessages; ++tag) {
    expectMessage(received[tag], before, tag);
  }
}

// Received in another order than sent.
inline void tagsKeepMessagesApart(PeerTransport& transport, int rank, int /*world*/) {
  constexpr size_t kBytes = 100;
  if (rank > 1) {
    return;
  }
  if (rank == 0) {
    const Bytes second = message(0, 2, kBytes), first = message(0, 1, kBytes);
    const auto a = transport.send(second, 1, 2);
    const auto b = transport.send(first, 1, 1);
    a->wait();
    b->wait();
    return;
  }
  Bytes first(kBytes), second(kBytes);
  const auto a = transport.receive(first, 0, 1);
  const auto b = transport.receive(second, 0, 2);
  a->wait();
  b->wait();
  expectMessage(first, 0, 1);
  expectMessage(second, 0, 2);
}

// Several under one tag: in the order in which they were sent.
inline void oneTagKeepsOrder(PeerTransport& transport, int rank, int /*world*/) {
  constexpr uint32_t kMessages = 16, kTag = 5;
  if (rank > 1) {
    return;
  }
  std::vector<Bytes> parts;
  std::vector<std::unique_ptr<PeerTransport::Pending>> pending;
  for (uint32_t i = 0; i < kMessages; ++i) {
    const size_t size = 1 + (kMessages - i) * size_t{50'000};
    parts.push_back(rank == 0 ? message(0, i, size) : Bytes(size));
  }
  for (Bytes& part : parts) {
    pending.push_back(rank == 0 ? transport.send(part, 1, kTag) : transport.receive(part, 0, kTag));
  }
  for (uint32_t i = 0; i < kMessages; ++i) {
    pending[i]->wait();
    expectMessage(parts[i], 0, i);
  }
}

inline void largeMessage(PeerTransport& transport, int rank, int /*world*/) {
  constexpr size_t kBytes = size_t{8} << 20;
  if (rank == 0) {
    const Bytes sent = message(0, 3, kBytes);
    transport.send(sent, 1, 3)->wait();
  } else if (rank == 1) {
    Bytes received(kBytes);
    transport.receive(received, 0, 3)->wait();
    expectMessage(received, 0, 3);
  }
}

using Case = void (*)(PeerTransport&, int rank, int world);

inline const std::vector<std::pair<std::string, Case>>& cases() {
  static const std::vector<std::pair<std::string, Case>> all = {
      {"ManyInFlight", &manyInFlight},
      {"TagsKeepMessagesApart", &tagsKeepMessagesApart},
      {"OneTagKeepsOrder", &oneTagKeepsOrder},
      {"LargeMessage", &largeMessage},
  };
  return all;
}

}  // namespace reft::transport_contract
