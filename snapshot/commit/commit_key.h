// The name of one attempt at a snapshot of the job.
//
// Threads: a value, freely copied. Errors: none.
#pragma once

#include <compare>
#include <cstdint>

namespace reft {

// The order (step, then incarnation) serves maps only: it does not tell which key is newer.
struct CommitKey {
  int64_t step = 0;
  uint64_t incarnation = 0;
  auto operator<=>(const CommitKey&) const = default;
};

}  // namespace reft
