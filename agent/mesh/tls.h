// TLS 1.3 between the agents of one job (REFT_MESH_TLS=on), by OpenSSL.
//
// Both sides have the mesh key, so the handshake needs no certificates: a key that is derived from
// the mesh key is its pre-shared key, together with an exchange of X25519 that is new for each
// connection. Who learns the job's key later cannot read what he has recorded. There are no
// tickets, no early data and one cipher, so nothing is negotiated that could be weaker. What runs
// inside (handshake.h, frames.h) is the same as without TLS.
//
// OpenSSL reads none of the machine's configuration here.
//
// Threads: a Tls is immutable. Errors: Unavailable if OpenSSL refuses its settings or has no
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "agent/mesh/channel.h"
#include "agent/mesh/handshake.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

// How an error says that one side has TLS on and the other one off.
inline constexpr std::string_view kTlsDiffers =
    "REFT_MESH_TLS differs between the nodes: set it to the same value on all of them";

class Tls {
 public:
  // The keeper, which connects, is the client.
  enum class Side : uint8_t { kClient, kServer };

  // `records_per_key`: after so many records that it has sent, a channel changes its key. AES-GCM
  // wants that before 2^24.5 (RFC 8446, 5.5).
  explicit Tls(const MeshKey& key, uint64_t records_per_key = uint64_t{1} << 22);

  // The socket does not block. It is connected once the channel is first used.
  std::unique_ptr<Channel> over(UniqueFd socket, Side side) const;

  // Whether bytes are the begin of a TLS handshake.
  static bool isHello(std::string_view bytes);

 private:
  struct Context;
  class TlsChannel;
  std::shared_ptr<const Context> context_;
};

}  // namespace reft::agent
