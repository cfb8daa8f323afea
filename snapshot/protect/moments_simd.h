// moments.h by vectors: one set of functions for each kind of processor.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include "snapshot/protect/moments.h"

namespace reft {

namespace avx2 {

bool advance(const AdamStep& step, const Moments<float>& moments);
bool advance(const AdamStep& step, const Moments<double>& moments);
void advance(const MomentumStep& step, const Moments<float>& moments);
void advance(const MomentumStep& step, const Moments<double>& moments);

}  // namespace avx2

namespace avx512 {

bool advance(const AdamStep& step, const Moments<float>& moments);
bool advance(const AdamStep& step, const Moments<double>& moments);
void advance(const MomentumStep& step, const Moments<float>& moments);
void advance(const MomentumStep& step, const Moments<double>& moments);

}  // namespace avx512

}  // namespace reft
