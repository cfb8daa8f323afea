// What Adam and SGD keep of a parameter, advanced by one step without the step of the parameter.
//
// Data-parallel ranks all have the parameters and the gradients, so a rank that computes what
// another one keeps ("aor") need not step the parameters, too. What is left are sums and products;
// neither a root nor a division. Each is rounded where torch's own kernels round it, so the result
// is theirs bit for bit: with denormal, infinite and undefined numbers, and at any vector length.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstddef>

namespace reft {

// One parameter's, or a part of it: `count` numbers at each place. T: float, double.
template <typename T>
struct Moments {
  const T* gradient = nullptr;
  const T* parameter = nullptr;  // before its step; read only where there is decay
  T* mean = nullptr;             // exp_avg, or momentum_buffer
  T* square = nullptr;           // exp_avg_sq; of Adam alone
  T* most = nullptr;             // max_exp_avg_sq; nullptr: not kept
  size_t count = 0;
};

// Of Adam and AdamW.
struct AdamStep {
  double mean_weight = 0;    // 1 - beta1
  double square_factor = 0;  // beta2
  double square_weight = 0;  // 1 - beta2
  double decay = 0;          // what is added to the gradient, as a share of the parameter
  bool maximize = false;
};

// Of SGD, of a parameter that has a buffer already.
struct MomentumStep {
  double momentum = 0;
  double gradient_weight = 1;  // 1 - dampening
  double decay = 0;
  bool maximize = false;
};

enum class Simd { kNone, kAvx2, kAvx512 };

// The widest that this processor and this build have.
Simd widestSimd();

// Returns whether `most` has numbers left that only torch's maximum() can give: where one of the
// two is not a number or has a minus sign, its result depends on where in the tensor it is. They
// are as before, and all others as they will be, so maximum(most, square) of the whole tensor
// completes them. `simd`: at most widestSimd().
bool advance(const AdamStep& step, const Moments<float>& moments, Simd simd = widestSimd());
bool advance(const AdamStep& step, const Moments<double>& moments, Simd simd = widestSimd());

void advance(const MomentumStep& step, const Moments<float>& moments, Simd simd = widestSimd());
void advance(const MomentumStep& step, const Moments<double>& moments, Simd simd = widestSimd());

}  // namespace reft
