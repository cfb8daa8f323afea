#include "snapshot/vault/xor.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "snapshot/vault/xor_avx2.h"

namespace reft {

namespace {

constexpr size_t kWorthXorAvx2 = 256;
constexpr size_t kXoredAtOnce = 1024;  // XORed at a time, while as much of what is next is fetched
constexpr size_t kFetchedLine = 64;

void fetch(std::span<const std::byte> lines) {
  for (size_t at = 0; at < lines.size(); at += kFetchedLine) {
    __builtin_prefetch(lines.data() + at, 0, 2);
  }
}

}  // namespace

void xorInto(std::byte* into, const std::byte* with, size_t bytes,
             std::span<const std::byte> next) {
  size_t at = 0;
  if (bytes >= kWorthXorAvx2 && avx2::available()) {
    const size_t whole = bytes / avx2::kXorBlock * avx2::kXorBlock;
    while (at < whole) {
      const size_t part = std::min(kXoredAtOnce, whole - at);
      const size_t from = std::min(at, next.size());
      fetch(next.subspan(from, std::min(part, next.size() - from)));
      avx2::xorBlocks(into + at, with + at, part);
      at += part;
    }
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
