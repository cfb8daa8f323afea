#include "snapshot/vault/copy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include <xxhash.h>

#include "intercept/base/hash.h"
#include "snapshot/vault/hash_avx2.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace reft {

namespace {

constexpr size_t kBlock =
    size_t{16} << 10;  // two blocks fit in L1: the one in work and the one that is being fetched
constexpr uint64_t kLine = 64;

// `next` is fetched meanwhile, so that memory is read while it is written. To fetch what is not
// there does nothing.
void streamCopy(std::byte* dst, const std::byte* src, size_t bytes,
                std::span<const std::byte> next) {
#if defined(__SSE2__)
  const size_t head = std::min<size_t>((16 - reinterpret_cast<uintptr_t>(dst) % 16) % 16, bytes);
  std::memcpy(dst, src, head);
  dst += head;
  src += head;
  bytes -= head;
  size_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    if (at < next.size()) {
      _mm_prefetch(reinterpret_cast<const char*>(next.data() + at), _MM_HINT_T1);
    }
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at + 16));
    const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at + 32));
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at + 48));
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at), a);
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at + 16), b);
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at + 32), c);
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at + 48), d);
  }
  std::memcpy(dst + at, src + at, bytes - at);
  _mm_sfence();
#else
  (void)next;
  std::memcpy(dst, src, bytes);
#endif
}

}  // namespace

ChunkHasher::ChunkHasher() : state_(XXH3_createState()) {
  if (state_ == nullptr) {
    throw std::bad_alloc();
  }
  reset();
}
ChunkHasher::~ChunkHasher() {
  XXH3_freeState(static_cast<XXH3_state_t*>(state_));
}
void ChunkHasher::reset() {
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_));
}
uint64_t ChunkHasher::digest() const {
  return XXH3_64bits_digest(static_cast<XXH3_state_t*>(state_));
}

void ChunkHasher::copy(std::byte* dst, const std::byte* src, size_t bytes,
                       std::span<const std::byte> next) {
  const bool fast = avx2::available();
  for (size_t at = 0; at < bytes; at += kBlock) {
    const size_t part = std::min(kBlock, bytes - at);
    if (fast) {
      avx2::update(state_, src + at, part);
    } else {
      XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), src + at, part);
    }
    streamCopy(dst + at, src + at, part, next.subspan(std::min(at, next.size())));
  }
}

void ChunkHasher::hash(const std::byte* data, size_t bytes) {
  if (avx2::available()) {
    avx2::update(state_, data, bytes);
  } else {
    XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), data, bytes);
  }
}

void ChunkHasher::zero(std::byte* dst, size_t bytes) {
  std::memset(dst, 0, bytes);
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), dst, bytes);
}

LineSamples::LineSamples(uint64_t bytes, uint32_t samples, uint64_t seed)
    : lines_(bytes / kLine),
      seed_(seed),
      count_(static_cast<uint32_t>(std::min<uint64_t>(samples, lines_))) {}

uint64_t LineSamples::next() {
  const uint64_t next = lines_ * (at_ + 1) / count_;
  const auto at = static_cast<uint64_t>(
      (static_cast<unsigned __int128>(mixed(seed_ + at_)) * (next - from_)) >> 64);
  const uint64_t line = from_ + at;
  from_ = next;
  ++at_;
  return line * kLine;
}

uint64_t sampleHash(const std::byte* data, uint64_t bytes, uint32_t samples, uint64_t seed) {
  if (bytes <= 4096 || samples == 0 || samples >= bytes / kLine) {
    return XXH3_64bits_withSeed(data, bytes, seed);
  }
  LineSamples lines(bytes, samples, seed);
  uint64_t folded = seed;
  // Nearly each line is a cache miss: asked for a block at a time, they come side by side.
  std::array<const std::byte*, 16> block;
  for (uint32_t i = 0; i < samples;) {
    size_t count = 0;
    for (; count < block.size() && i < samples; ++i, ++count) {
      block[count] = data + lines.next();
      __builtin_prefetch(block[count]);
    }
    for (size_t k = 0; k < count; ++k) {
      folded = mixed(folded ^ XXH3_64bits(block[k], kLine));
    }
  }
  return folded;
}

}  // namespace reft
