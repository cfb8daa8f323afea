#include "snapshot/vault/xor.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "snapshot/vault/xor_avx2.h"

namespace reft {

namespace {

constexpr size_t kWorthXorAvx2 = 256;
constexpr size_t kXoredAtOnce = 1024;  // XORed at a time, while as much of what is next is fetched
constexpr size_t kFetchedLine = 64;
constexpr size_t kAligned = 32;     // what is stored past the cache
constexpr size_t kMostAtOnce = 16;  // more are XORed by words

// Of one word or byte.
template <typename T>
void xorOne(std::byte* into, std::span<const std::byte* const> with, size_t at) {
  T sum = 0;
  for (const std::byte* const one : with) {
    T value = 0;
    std::memcpy(&value, one + at, sizeof(value));
    sum = static_cast<T>(sum ^ value);
  }
  std::memcpy(into + at, &sum, sizeof(sum));
}

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

void xorOf(std::byte* into, std::span<const std::byte* const> with, size_t bytes) {
  size_t at = 0;
  if (bytes >= kWorthXorAvx2 && avx2::available()) {
    for (; reinterpret_cast<uintptr_t>(into + at) % kAligned != 0; ++at) {
      xorOne<uint8_t>(into, with, at);
    }
    const size_t whole = (bytes - at) / avx2::kXorBlock * avx2::kXorBlock;
    std::array<const std::byte*, kMostAtOnce> some;
    if (with.size() <= some.size()) {
      for (size_t k = 0; k < with.size(); ++k) {
        some[k] = with[k] + at;
      }
      avx2::xorAll(into + at, some.data(), with.size(), whole);
      at += whole;
    }
  }
  for (; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    xorOne<uint64_t>(into, with, at);
  }
  for (; at < bytes; ++at) {
    xorOne<uint8_t>(into, with, at);
  }
}

}  // namespace reft
