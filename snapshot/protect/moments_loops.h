// The loops of moments.h, for any vector type.
//
// A vector type V has: Number and Value (one number, kWidth of them), load, store, all (a value of
// equal numbers), subtract, multiply, fused (a * b + c, rounded once), negated, and
//   bool larger(Value& most, Value square): puts in `most` where `square` is larger; returns
//   whether some could not be compared by their bits, and stay as they are.
//
// Each file that includes this compiles it for another processor, so V is a type of that file
// alone: the linker then never takes one file's code for another's. For the same reason, no header
// of the standard library that has code is included here.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "snapshot/protect/moments.h"

namespace reft::loops {

template <typename T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = int32_t;
  static constexpr Type kInfinite = 0x7f800000;
  static constexpr Type kSign = INT32_MIN;
};
template <>
struct BitsOf<double> {
  using Type = int64_t;
  static constexpr Type kInfinite = 0x7ff0000000000000;
  static constexpr Type kSign = INT64_MIN;
};

// One number at a time. `File`: a type of the file that includes this.
template <typename T, typename File>
struct One {
  using Number = T;
  using Value = T;
  using Bits = typename BitsOf<T>::Type;
  static constexpr size_t kWidth = 1;

  static T load(const T* from) { return *from; }
  static void store(T* to, T value) { *to = value; }
  static T all(T value) { return value; }
  static T subtract(T a, T b) { return a - b; }
  static T multiply(T a, T b) { return a * b; }
  static T fused(T a, T b, T c) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return __builtin_fmaf(a, b, c);
    } else {
      return __builtin_fma(a, b, c);
    }
  }
  // By its bits: the compiler would make fused(a, b, -c) one instruction, which keeps the sign of
  // an undefined c.
  static T negated(T value) {
    const Bits bits = bitsOf(value) ^ BitsOf<T>::kSign;
    T result;
    __builtin_memcpy(&result, &bits, sizeof(result));
    return result;
  }
  static bool larger(T& most, T square) {
    const Bits a = bitsOf(most), b = bitsOf(square);
    constexpr Bits kMost = BitsOf<T>::kInfinite;
    if (a < 0 || b < 0 || a > kMost || b > kMost) {
      return true;
    }
    most = b > a ? square : most;
    return false;
  }

 private:
  static Bits bitsOf(T value) {
    Bits bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
};

// What the optimizer takes for the gradient.
template <typename V>
struct Gradient {
  using Number = typename V::Number;
  using Value = typename V::Value;

  Gradient(const Moments<Number>& moments, double decay, bool maximize)
      : gradient(moments.gradient),
        parameter(decay != 0 ? moments.parameter : nullptr),
        share(V::all(static_cast<Number>(decay))),
        is_negated(maximize) {}

  Value at(size_t i) const {
    Value value = V::load(gradient + i);
    if (is_negated) {
      value = V::negated(value);
    }
    return parameter == nullptr ? value : V::fused(share, V::load(parameter + i), value);
  }

  const Number* const gradient;
  const Number* const parameter;
  const Value share;
  const bool is_negated;
};

// The end of a page's numbers from `from` on. Fetches the first line of what follows: processors
// fetch lines ahead only up to the end of a page. Without this, it takes a fifth more time.
template <typename V>
size_t pageEnd(const Moments<typename V::Number>& moments, size_t from) {
  constexpr size_t kPage = 4096 / sizeof(typename V::Number);
  if (from + kPage >= moments.count) {
    return moments.count;
  }
  const size_t next = from + kPage;
  __builtin_prefetch(moments.gradient + next, 0);
  __builtin_prefetch(moments.mean + next, 1);
  if (moments.square != nullptr) {
    __builtin_prefetch(moments.square + next, 1);
  }
  return next;
}

// All of these return where they have ended: less than one vector before the end.

template <typename V>
size_t advance(const AdamStep& step, const Moments<typename V::Number>& moments, size_t from,
               bool& is_incomplete) {
  using Number = typename V::Number;
  using Value = typename V::Value;
  const Gradient<V> gradients(moments, step.decay, step.maximize);
  const auto weight = static_cast<Number>(step.mean_weight);
  // As torch's lerp(): from the end that is nearer.
  const bool is_from_mean = !((weight < 0 ? -weight : weight) >= Number(0.5));
  const Value coefficient = V::all(is_from_mean ? weight : weight - Number(1));
  const Value factor = V::all(static_cast<Number>(step.square_factor));
  const Value square_weight = V::all(static_cast<Number>(step.square_weight));
  size_t i = from;
  while (i + V::kWidth <= moments.count) {
    const size_t end = pageEnd<V>(moments, i);
    for (; i + V::kWidth <= end; i += V::kWidth) {
      const Value gradient = gradients.at(i);
      const Value mean = V::load(moments.mean + i);
      V::store(moments.mean + i,
               V::fused(coefficient, V::subtract(gradient, mean), is_from_mean ? mean : gradient));
      const Value square = V::fused(V::multiply(square_weight, gradient), gradient,
                                    V::multiply(V::load(moments.square + i), factor));
      V::store(moments.square + i, square);
      if (moments.most != nullptr) {
        Value most = V::load(moments.most + i);
        is_incomplete |= V::larger(most, square);
        V::store(moments.most + i, most);
      }
    }
  }
  return i;
}

template <typename V>
size_t advance(const MomentumStep& step, const Moments<typename V::Number>& moments, size_t from) {
  using Number = typename V::Number;
  using Value = typename V::Value;
  const Gradient<V> gradients(moments, step.decay, step.maximize);
  const Value momentum = V::all(static_cast<Number>(step.momentum));
  const Value weight = V::all(static_cast<Number>(step.gradient_weight));
  size_t i = from;
  while (i + V::kWidth <= moments.count) {
    const size_t end = pageEnd<V>(moments, i);
    for (; i + V::kWidth <= end; i += V::kWidth) {
      const Value kept = V::multiply(V::load(moments.mean + i), momentum);
      V::store(moments.mean + i, V::fused(weight, gradients.at(i), kept));
    }
  }
  return i;
}

// By vectors, then the rest by single numbers.
template <typename V, typename File>
bool advanceAll(const AdamStep& step, const Moments<typename V::Number>& moments) {
  bool is_incomplete = false;
  const size_t at = advance<V>(step, moments, 0, is_incomplete);
  advance<One<typename V::Number, File>>(step, moments, at, is_incomplete);
  return is_incomplete;
}

template <typename V, typename File>
void advanceAll(const MomentumStep& step, const Moments<typename V::Number>& moments) {
  const size_t at = advance<V>(step, moments, 0);
  advance<One<typename V::Number, File>>(step, moments, at);
}

}  // namespace reft::loops
