// Moves bytes between the ranks of a job, for restoring what lies on other nodes.
//
// A message goes from one rank to another and is named by its tag, which is below 2^24; both sides
// know its length. Many may be in flight; those of one tag arrive in the order in which they were
// sent. The bytes of a message must stay alive, and those of a send unchanged, until wait() has
// returned.
//
// Threads: one at a time. Errors: PeerFailure or the transport's own, from send(), receive() and
// wait(); the transport is then of no further use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace reft {

class PeerTransport {
 public:
  // A message under way.
  class Pending {
   public:
    virtual ~Pending() = default;
    virtual void wait() = 0;
  };

  virtual ~PeerTransport() = default;
  virtual std::unique_ptr<Pending> send(std::span<const std::byte> bytes, int to, uint32_t tag) = 0;
  virtual std::unique_ptr<Pending> receive(std::span<std::byte> bytes, int from, uint32_t tag) = 0;
};

}  // namespace reft
