// HMAC and HKDF over SHA-256 (RFC 2104, RFC 5869). SHA-256 itself is OpenSSL's.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <array>
#include <initializer_list>
#include <string_view>

namespace reft {

using Sha256 = std::array<unsigned char, 32>;

// Of the concatenated parts.
Sha256 hmacSha256(std::string_view key, std::initializer_list<std::string_view> parts);
// One block of HKDF: 32 bytes that tell nothing about those for another salt or purpose.
Sha256 hkdfSha256(std::string_view secret, std::string_view salt, std::string_view purpose);
// Takes as long wherever they differ.
bool sameInConstantTime(const Sha256& a, const Sha256& b);

}  // namespace reft
