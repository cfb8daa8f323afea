// Moves the bytes of a restore between ranks over a c10d backend that takes tensors on the host.
//
// Threads: one at a time. Errors: those of the backend.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "snapshot/peer_transport.h"

namespace reft {

class SnapshotTransport final : public PeerTransport {
 public:
  explicit SnapshotTransport(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  std::unique_ptr<Pending> send(std::span<const std::byte> bytes, int to, uint32_t tag) override;
  std::unique_ptr<Pending> receive(std::span<std::byte> bytes, int from, uint32_t tag) override;

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace reft
