// How two agents of one job show each other that both have the job's mesh key, which never crosses
// the network.
//
//   keeper                                       owner
//     greeting: magic, version, nonce   ──────►
//                                       ◄──────  answer: nonce, MAC of both nonces as the owner
//     proof: MAC of both nonces         ──────►
//
// Each side has drawn a nonce of its own, so an earlier exchange that is played back proves
// nothing; the MACs name the role, so neither does one's own MAC that is sent back. The frames that
// follow (frames.h) carry MACs under keys of this connection.
//
// Threads: re-entrant. Errors: none; what is not right gives nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "intercept/link/sha256.h"

namespace reft::agent {

using MeshKey = Sha256;  // from the job's secret: python/reft/_link/mesh.py
using Nonce = std::array<unsigned char, 32>;

inline constexpr std::string_view kGreetingMagic = "RFTMESH1";  // what a keeper says first
constexpr size_t kGreetingBytes = 48;
constexpr size_t kAnswerBytes = 64;
constexpr size_t kProofBytes = 32;

// Keys of the MACs of one connection.
struct SessionKeys {
  Sha256 of_keeper{};
  Sha256 of_owner{};
};

// Throws SystemError if the kernel gives no random bytes.
Nonce drawNonce();

std::string greetingOf(const Nonce& keeper);
std::optional<Nonce> openGreeting(std::string_view bytes);

std::string answerOf(const MeshKey& key, const Nonce& keeper, const Nonce& owner);
// The owner's nonce, if it has the key.
std::optional<Nonce> openAnswer(const MeshKey& key, const Nonce& keeper, std::string_view bytes);

std::string proofOf(const MeshKey& key, const Nonce& keeper, const Nonce& owner);
bool isProof(const MeshKey& key, const Nonce& keeper, const Nonce& owner, std::string_view bytes);

SessionKeys sessionKeysOf(const MeshKey& key, const Nonce& keeper, const Nonce& owner);

}  // namespace reft::agent
