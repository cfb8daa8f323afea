#include "snapshot/protect/moments.h"

#include "snapshot/protect/moments_loops.h"
#include "snapshot/protect/moments_simd.h"
#include "snapshot/vault/avx2.h"

namespace reft {

namespace {

struct Portable {};

Simd detectSimd() {
#if defined(REFT_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f")) {
    return Simd::kAvx512;
  }
#endif
#if defined(REFT_HAVE_AVX2)
  if (avx2::available() && __builtin_cpu_supports("fma")) {
    return Simd::kAvx2;
  }
#endif
  return Simd::kNone;
}

template <typename Step, typename T>
auto advanceBy(Simd simd, const Step& step, const Moments<T>& moments) {
#if defined(REFT_HAVE_AVX512)
  if (simd == Simd::kAvx512) {
    return avx512::advance(step, moments);
  }
#endif
#if defined(REFT_HAVE_AVX2)
  if (simd == Simd::kAvx2) {
    return avx2::advance(step, moments);
  }
#endif
  static_cast<void>(simd);
  return loops::advanceAll<loops::One<T, Portable>, Portable>(step, moments);
}

}  // namespace

Simd widestSimd() {
  static const Simd found = detectSimd();
  return found;
}

bool advance(const AdamStep& step, const Moments<float>& moments, Simd simd) {
  return advanceBy(simd, step, moments);
}

bool advance(const AdamStep& step, const Moments<double>& moments, Simd simd) {
  return advanceBy(simd, step, moments);
}

void advance(const MomentumStep& step, const Moments<float>& moments, Simd simd) {
  advanceBy(simd, step, moments);
}

void advance(const MomentumStep& step, const Moments<double>& moments, Simd simd) {
  advanceBy(simd, step, moments);
}

}  // namespace reft
