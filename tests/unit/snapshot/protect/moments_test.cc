#include "snapshot/protect/moments.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

namespace reft {
namespace moments_test {

template <typename T>
using Bits = std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t>;

template <typename T>
Bits<T> bitsOf(T value) {
  return std::bit_cast<Bits<T>>(value);
}

// Numbers of all sizes, and the odd ones: denormal, infinite, undefined in two ways, both zeros.
template <typename T>
std::vector<T> numbers(size_t count, uint64_t seed, bool with_odd) {
  using Limits = std::numeric_limits<T>;
  const std::vector<T> odd = {T(0),
                              -T(0),
                              Limits::denorm_min(),
                              -3 * Limits::denorm_min(),
                              Limits::min(),
                              Limits::max(),
                              Limits::infinity(),
                              -Limits::infinity(),
                              Limits::quiet_NaN(),
                              -Limits::quiet_NaN()};
  std::mt19937_64 random(seed);
  std::vector<T> made(count);
  for (T& one : made) {
    const double size = std::exp2(static_cast<double>(random() % 41) - 30);
    one = static_cast<T>((static_cast<double>(random() % 200'001) / 100'000 - 1) * size);
    if (with_odd && random() % 3 == 0) {
      one = odd[random() % odd.size()];
    }
  }
  return made;
}

// What a parameter has, and the same computed number by number as torch.optim does.
template <typename T>
struct Case {
  Case(size_t count, uint64_t seed, bool with_odd)
      : gradient(numbers<T>(count, seed, with_odd)),
        parameter(numbers<T>(count, seed + 1, with_odd)),
        mean(numbers<T>(count, seed + 2, with_odd)),
        square(numbers<T>(count, seed + 3, with_odd)),
        most(numbers<T>(count, seed + 4, with_odd)) {
    for (size_t i = 0; i < count; ++i) {
      square[i] = with_odd && seed % 2 == 0 ? square[i] : std::fabs(square[i]);
      most[i] = with_odd && seed % 3 == 0 ? most[i] : std::fabs(most[i]);
    }
  }

  Moments<T> moments(size_t from = 0) {
    return {gradient.data() + from, parameter.data() + from, mean.data() + from,
            square.data() + from,   most.data() + from,      gradient.size() - from};
  }

  T gradientAt(size_t i, double decay, bool maximize) const {
    const T value =
        maximize ? std::bit_cast<T>(bitsOf(gradient[i]) ^ bitsOf(T(-0.0))) : gradient[i];
    return decay == 0 ? value : std::fma(static_cast<T>(decay), parameter[i], value);
  }

  void advanceByHand(const AdamStep& step) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      const T g = gradientAt(i, step.decay, step.maximize);
      const auto weight = static_cast<T>(step.mean_weight);
      mean[i] = std::fabs(weight) >= T(0.5) ? std::fma(weight - 1, g - mean[i], g)
                                            : std::fma(weight, g - mean[i], mean[i]);
      const T kept = square[i] * static_cast<T>(step.square_factor);
      square[i] = std::fma(static_cast<T>(step.square_weight) * g, g, kept);
      if (most[i] < square[i] && !std::signbit(most[i])) {
        most[i] = square[i];
      }
    }
  }

  void advanceByHand(const MomentumStep& step) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      const T g = gradientAt(i, step.decay, step.maximize);
      const T kept = mean[i] * static_cast<T>(step.momentum);
      mean[i] = std::fma(static_cast<T>(step.gradient_weight), g, kept);
    }
  }

  bool hasIncomparable() const {
    for (size_t i = 0; i < most.size(); ++i) {
      for (const T one : {most[i], square[i]}) {
        if (std::isnan(one) || std::signbit(one)) {
          return true;
        }
      }
    }
    return false;
  }

  std::vector<T> gradient, parameter, mean, square, most;
};

template <typename T>
void expectSameBits(const std::vector<T>& found, const std::vector<T>& expected, const char* what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(bitsOf(found[i]), bitsOf(expected[i]))
        << what << " " << i << " of " << expected.size() << ": " << found[i] << ", not "
        << expected[i];
  }
}

std::vector<Simd> kinds() {
  std::vector<Simd> found = {Simd::kNone};
  for (const Simd simd : {Simd::kAvx2, Simd::kAvx512}) {
    if (simd <= widestSimd()) {
      found.push_back(simd);
    }
  }
  return found;
}

// All short ones, and some of several pages.
std::vector<size_t> counts() {
  std::vector<size_t> found = {512, 1023, 1024, 1025, 2600};
  for (size_t count = 0; count < 70; ++count) {
    found.push_back(count);
  }
  return found;
}

template <typename T>
class MomentsOf : public testing::Test {};
using Numbers = testing::Types<float, double>;
TYPED_TEST_SUITE(MomentsOf, Numbers);

TYPED_TEST(MomentsOf, AdamAreRoundedWhereTorchRoundsThem) {
  const std::vector<AdamStep> steps = {
      {1 - 0.9, 0.999, 1 - 0.999, 0, false},  {1 - 0.9, 0.999, 1 - 0.999, 0.01, false},
      {1 - 0.3, 0.95, 1 - 0.95, 0, true},     {1 - 0.0, 0.0, 1 - 0.0, 0.1, true},
      {1 - 0.5, 0.98, 1 - 0.98, 1e-3, false},
  };
  for (const Simd simd : kinds()) {
    for (const size_t count : counts()) {
      for (size_t k = 0; k < steps.size(); ++k) {
        for (const bool with_odd : {false, true}) {
          Case<TypeParam> found(count, 11 * count + k, with_odd);
          Case<TypeParam> expected = found;
          const bool is_incomplete = advance(steps[k], found.moments(), simd);
          const std::vector<TypeParam> before = expected.most;
          expected.advanceByHand(steps[k]);
          expectSameBits(found.mean, expected.mean, "mean");
          expectSameBits(found.square, expected.square, "square");
          expectSameBits(found.most, expected.most, "most");
          Case<TypeParam> seen = expected;
          seen.most = before;
          ASSERT_EQ(is_incomplete, seen.hasIncomparable());
        }
      }
    }
  }
}

TYPED_TEST(MomentsOf, SgdAreRoundedWhereTorchRoundsThem) {
  const std::vector<MomentumStep> steps = {
      {0.9, 1, 0, false}, {0.9, 1 - 0.2, 0.01, false}, {0.5, 0, 0, true}, {1.0, 1, 0.1, true}};
  for (const Simd simd : kinds()) {
    for (const size_t count : counts()) {
      for (size_t k = 0; k < steps.size(); ++k) {
        for (const bool with_odd : {false, true}) {
          Case<TypeParam> found(count, 7 * count + k, with_odd);
          Case<TypeParam> expected = found;
          advance(steps[k], found.moments(), simd);
          expected.advanceByHand(steps[k]);
          expectSameBits(found.mean, expected.mean, "buffer");
          expectSameBits(found.square, expected.square, "what is not of SGD");
        }
      }
    }
  }
}

// Wherever they begin, and with what is next to them left alone.
TYPED_TEST(MomentsOf, PartsAreTheWhole) {
  const AdamStep step = {1 - 0.9, 0.999, 1 - 0.999, 0.01, false};
  for (const Simd simd : kinds()) {
    for (size_t cut = 0; cut < 100; cut += 7) {
      Case<TypeParam> found(100, 5, true);
      Case<TypeParam> expected = found;
      advance(step, expected.moments(), simd);
      Moments<TypeParam> first = found.moments();
      first.count = cut;
      advance(step, first, simd);
      advance(step, found.moments(cut), simd);
      expectSameBits(found.mean, expected.mean, "mean");
      expectSameBits(found.square, expected.square, "square");
      expectSameBits(found.most, expected.most, "most");
    }
  }
}

}  // namespace moments_test
}  // namespace reft
