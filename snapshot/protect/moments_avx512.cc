// Compiled with -mavx512f -mfma (snapshot/CMakeLists.txt). Includes no header of the standard
// library that has code: see snapshot/protect/moments_loops.h.
#include "snapshot/protect/moments_simd.h"

#if defined(REFT_HAVE_AVX512)
#include <immintrin.h>

#include "snapshot/protect/moments_loops.h"

namespace reft::avx512 {

namespace {

struct File {};

struct Floats {
  using Number = float;
  using Value = __m512;
  static constexpr size_t kWidth = 16;

  static Value load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Value value) { _mm512_storeu_ps(to, value); }
  static Value all(float value) { return _mm512_set1_ps(value); }
  static Value subtract(Value a, Value b) { return _mm512_sub_ps(a, b); }
  static Value multiply(Value a, Value b) { return _mm512_mul_ps(a, b); }
  static Value fused(Value a, Value b, Value c) { return _mm512_fmadd_ps(a, b, c); }
  static Value negated(Value value) {
    const __m512i sign = _mm512_set1_epi32(loops::BitsOf<float>::kSign);
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(value), sign));
  }
  // As unsigned numbers, all that have a sign or are undefined are above infinity.
  static bool larger(Value& most, Value square) {
    const __m512i a = _mm512_castps_si512(most), b = _mm512_castps_si512(square);
    const __m512i infinite = _mm512_set1_epi32(loops::BitsOf<float>::kInfinite);
    const __mmask16 odd =
        _mm512_cmpgt_epu32_mask(a, infinite) | _mm512_cmpgt_epu32_mask(b, infinite);
    const auto take = static_cast<__mmask16>(_mm512_cmpgt_epu32_mask(b, a) & ~odd);
    most = _mm512_mask_mov_ps(most, take, square);
    return odd != 0;
  }
};

struct Doubles {
  using Number = double;
  using Value = __m512d;
  static constexpr size_t kWidth = 8;

  static Value load(const double* from) { return _mm512_loadu_pd(from); }
  static void store(double* to, Value value) { _mm512_storeu_pd(to, value); }
  static Value all(double value) { return _mm512_set1_pd(value); }
  static Value subtract(Value a, Value b) { return _mm512_sub_pd(a, b); }
  static Value multiply(Value a, Value b) { return _mm512_mul_pd(a, b); }
  static Value fused(Value a, Value b, Value c) { return _mm512_fmadd_pd(a, b, c); }
  static Value negated(Value value) {
    const __m512i sign = _mm512_set1_epi64(loops::BitsOf<double>::kSign);
    return _mm512_castsi512_pd(_mm512_xor_si512(_mm512_castpd_si512(value), sign));
  }
  static bool larger(Value& most, Value square) {
    const __m512i a = _mm512_castpd_si512(most), b = _mm512_castpd_si512(square);
    const __m512i infinite = _mm512_set1_epi64(loops::BitsOf<double>::kInfinite);
    const auto odd = static_cast<__mmask8>(_mm512_cmpgt_epu64_mask(a, infinite) |
                                           _mm512_cmpgt_epu64_mask(b, infinite));
    const auto take = static_cast<__mmask8>(_mm512_cmpgt_epu64_mask(b, a) & ~odd);
    most = _mm512_mask_mov_pd(most, take, square);
    return odd != 0;
  }
};

}  // namespace

bool advance(const AdamStep& step, const Moments<float>& moments) {
  return loops::advanceAll<Floats, File>(step, moments);
}

bool advance(const AdamStep& step, const Moments<double>& moments) {
  return loops::advanceAll<Doubles, File>(step, moments);
}

void advance(const MomentumStep& step, const Moments<float>& moments) {
  loops::advanceAll<Floats, File>(step, moments);
}

void advance(const MomentumStep& step, const Moments<double>& moments) {
  loops::advanceAll<Doubles, File>(step, moments);
}

}  // namespace reft::avx512
#endif
