// Compiled with -mavx2 -mfma (snapshot/CMakeLists.txt). Includes no header of the standard library
// that has code: see snapshot/protect/moments_loops.h.
#include "snapshot/protect/moments_simd.h"

#if defined(REFT_HAVE_AVX2)
#include <immintrin.h>

#include "snapshot/protect/moments_loops.h"

namespace reft::avx2 {

namespace {

struct File {};

struct Floats {
  using Number = float;
  using Value = __m256;
  static constexpr size_t kWidth = 8;

  static Value load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Value value) { _mm256_storeu_ps(to, value); }
  static Value all(float value) { return _mm256_set1_ps(value); }
  static Value subtract(Value a, Value b) { return _mm256_sub_ps(a, b); }
  static Value multiply(Value a, Value b) { return _mm256_mul_ps(a, b); }
  static Value fused(Value a, Value b, Value c) { return _mm256_fmadd_ps(a, b, c); }
  static Value negated(Value value) { return _mm256_xor_ps(value, all(-0.0f)); }
  static bool larger(Value& most, Value square) {
    const __m256i a = _mm256_castps_si256(most), b = _mm256_castps_si256(square);
    const __m256i infinite = _mm256_set1_epi32(loops::BitsOf<float>::kInfinite);
    const __m256i above =
        _mm256_or_si256(_mm256_cmpgt_epi32(a, infinite), _mm256_cmpgt_epi32(b, infinite));
    const __m256i zero = _mm256_setzero_si256();
    const __m256i below = _mm256_or_si256(_mm256_cmpgt_epi32(zero, a), _mm256_cmpgt_epi32(zero, b));
    const __m256i odd = _mm256_or_si256(above, below);
    const __m256i take = _mm256_andnot_si256(odd, _mm256_cmpgt_epi32(b, a));
    most = _mm256_blendv_ps(most, square, _mm256_castsi256_ps(take));
    return _mm256_testz_si256(odd, odd) == 0;
  }
};

struct Doubles {
  using Number = double;
  using Value = __m256d;
  static constexpr size_t kWidth = 4;

  static Value load(const double* from) { return _mm256_loadu_pd(from); }
  static void store(double* to, Value value) { _mm256_storeu_pd(to, value); }
  static Value all(double value) { return _mm256_set1_pd(value); }
  static Value subtract(Value a, Value b) { return _mm256_sub_pd(a, b); }
  static Value multiply(Value a, Value b) { return _mm256_mul_pd(a, b); }
  static Value fused(Value a, Value b, Value c) { return _mm256_fmadd_pd(a, b, c); }
  static Value negated(Value value) { return _mm256_xor_pd(value, all(-0.0)); }
  static bool larger(Value& most, Value square) {
    const __m256i a = _mm256_castpd_si256(most), b = _mm256_castpd_si256(square);
    const __m256i infinite = _mm256_set1_epi64x(loops::BitsOf<double>::kInfinite);
    const __m256i above =
        _mm256_or_si256(_mm256_cmpgt_epi64(a, infinite), _mm256_cmpgt_epi64(b, infinite));
    const __m256i zero = _mm256_setzero_si256();
    const __m256i below = _mm256_or_si256(_mm256_cmpgt_epi64(zero, a), _mm256_cmpgt_epi64(zero, b));
    const __m256i odd = _mm256_or_si256(above, below);
    const __m256i take = _mm256_andnot_si256(odd, _mm256_cmpgt_epi64(b, a));
    most = _mm256_blendv_pd(most, square, _mm256_castsi256_pd(take));
    return _mm256_testz_si256(odd, odd) == 0;
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

}  // namespace reft::avx2
#endif
