#include "agent/mesh/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "intercept/base/error.h"

namespace reft::agent {

namespace {

constexpr uint32_t kMeshVersion = 2;

// What every greeting of this version begins with.
std::string greetingHead() {
  std::string bytes(kGreetingMagic);
  bytes.append(reinterpret_cast<const char*>(&kMeshVersion), sizeof(kMeshVersion));
  bytes.append(sizeof(uint32_t), '\0');
  return bytes;
}

std::string_view viewOf(const std::array<unsigned char, 32>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::array<unsigned char, 32> arrayOf(std::string_view bytes) {
  std::array<unsigned char, 32> result{};
  std::memcpy(result.data(), bytes.data(), std::min(bytes.size(), result.size()));
  return result;
}

Sha256 macOf(const MeshKey& key, std::string_view role, const Nonce& keeper, const Nonce& owner) {
  return hmacSha256(viewOf(key), {role, viewOf(keeper), viewOf(owner)});
}

constexpr std::string_view kOwner = "reft mesh owner";
constexpr std::string_view kKeeper = "reft mesh keeper";

}  // namespace

Nonce drawNonce() {
  Nonce nonce{};
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw SystemError("getrandom");
  }
  return nonce;
}

std::string greetingOf(const Nonce& keeper) {
  return greetingHead() + std::string(viewOf(keeper));
}

std::optional<Nonce> openGreeting(std::string_view bytes) {
  const std::string head = greetingHead();
  if (bytes.size() != kGreetingBytes || bytes.substr(0, head.size()) != head) {
    return std::nullopt;
  }
  return arrayOf(bytes.substr(head.size()));
}

std::string answerOf(const MeshKey& key, const Nonce& keeper, const Nonce& owner) {
  return std::string(viewOf(owner)) + std::string(viewOf(macOf(key, kOwner, keeper, owner)));
}

std::optional<Nonce> openAnswer(const MeshKey& key, const Nonce& keeper, std::string_view bytes) {
  if (bytes.size() != kAnswerBytes) {
    return std::nullopt;
  }
  const Nonce owner = arrayOf(bytes.substr(0, sizeof(Nonce)));
  const Sha256 mac = arrayOf(bytes.substr(sizeof(Nonce)));
  return sameInConstantTime(mac, macOf(key, kOwner, keeper, owner)) ? std::optional(owner)
                                                                    : std::nullopt;
}

std::string proofOf(const MeshKey& key, const Nonce& keeper, const Nonce& owner) {
  return std::string(viewOf(macOf(key, kKeeper, keeper, owner)));
}

bool isProof(const MeshKey& key, const Nonce& keeper, const Nonce& owner, std::string_view bytes) {
  return bytes.size() == kProofBytes &&
         sameInConstantTime(arrayOf(bytes), macOf(key, kKeeper, keeper, owner));
}

SessionKeys sessionKeysOf(const MeshKey& key, const Nonce& keeper, const Nonce& owner) {
  const std::string salt = std::string(viewOf(keeper)) + std::string(viewOf(owner));
  return {hkdfSha256(viewOf(key), salt, "reft mesh frames of the keeper"),
          hkdfSha256(viewOf(key), salt, "reft mesh frames of the owner")};
}

}  // namespace reft::agent
