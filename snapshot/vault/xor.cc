#include "snapshot/vault/xor.h"

#include <cstdint>
#include <cstring>

#include "snapshot/vault/xor_avx2.h"

namespace reft {

namespace {

constexpr size_t kWorthAvx2 = 256;

}  // namespace

void xorInto(std::byte* into, const std::byte* with, size_t bytes) {
  size_t at = 0;
  if (bytes >= kWorthAvx2 && avx2::xorAvailable()) {
    at = bytes / 128 * 128;
    avx2::xorBlocks(into, with, at);
  }
  for (; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    uint64_t a = 0, b = 0;
    std::memcpy(&a, into + at, sizeof(a));
    std::memcpy(&b, with + at, sizeof(b));
    a ^= b;
    std::memcpy(into + at, &a, sizeof(a));
  }
  for (; at < bytes; ++at) {
    into[at] ^= with[at];
  }
}

}  // namespace reft
