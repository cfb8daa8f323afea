// Whether files that are compiled for AVX2 may run.
//
// Threads: re-entrant. Errors: none.
#pragma once

namespace reft::avx2 {

// Whether they were compiled, and the processor has AVX2.
inline bool available() {
#if defined(REFT_HAVE_AVX2)
  static const bool found = __builtin_cpu_supports("avx2") != 0;
  return found;
#else
  return false;
#endif
}

}  // namespace reft::avx2
