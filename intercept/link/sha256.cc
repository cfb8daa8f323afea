#include "intercept/link/sha256.h"

#include <cstring>

// The functions of one algorithm: the newer interface would bring in the whole of OpenSSL, with
// its configuration files and providers, and this library is linked into a foreign process.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/crypto.h>
#include <openssl/sha.h>

namespace reft {

namespace {

constexpr size_t kBlock = SHA256_CBLOCK;

std::string_view viewOf(const Sha256& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void update(SHA256_CTX& context, std::string_view bytes) {
  SHA256_Update(&context, bytes.data(), bytes.size());
}

}  // namespace

Sha256 hmacSha256(std::string_view key, std::initializer_list<std::string_view> parts) {
  Sha256 result{};
  SHA256_CTX context;
  std::array<char, kBlock> inner{};
  if (key.size() > kBlock) {
    SHA256_Init(&context);
    update(context, key);
    SHA256_Final(result.data(), &context);
    std::memcpy(inner.data(), result.data(), result.size());
  } else if (!key.empty()) {
    std::memcpy(inner.data(), key.data(), key.size());
  }
  std::array<char, kBlock> outer = inner;
  for (size_t i = 0; i < kBlock; ++i) {
    inner[i] = static_cast<char>(inner[i] ^ 0x36);
    outer[i] = static_cast<char>(outer[i] ^ 0x5c);
  }
  SHA256_Init(&context);
  update(context, {inner.data(), inner.size()});
  for (const std::string_view part : parts) {
    update(context, part);
  }
  SHA256_Final(result.data(), &context);
  SHA256_Init(&context);
  update(context, {outer.data(), outer.size()});
  update(context, viewOf(result));
  SHA256_Final(result.data(), &context);
  OPENSSL_cleanse(inner.data(), inner.size());
  OPENSSL_cleanse(outer.data(), outer.size());
  OPENSSL_cleanse(&context, sizeof(context));
  return result;
}

Sha256 hkdfSha256(std::string_view secret, std::string_view salt, std::string_view purpose) {
  Sha256 extracted = hmacSha256(salt, {secret});
  const Sha256 result = hmacSha256(viewOf(extracted), {purpose, std::string_view("\x01", 1)});
  OPENSSL_cleanse(extracted.data(), extracted.size());
  return result;
}

bool sameInConstantTime(const Sha256& a, const Sha256& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace reft
