// Fault points: places in the code where a test makes this rank die, addressed by (rank, step,
// point).
//
// REFT_FAULT="rank:step:point:action[;…]": rank and step may be `*`; action is kill, stop, exit or
// abort; `step` counts snapshot steps. The spec fires only in torchrun's attempt REFT_FAULT_ATTEMPT
// (default: 0, the first start), so that a restarted rank is not killed again. Cost when unused:
// one relaxed load.
//
// Threads: any. Errors: configureFaults() throws InvalidArgument for a malformed spec.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace reft {

// Names of the points, in the order of a snapshot's life. The table is what `tools/dev fault`
// enumerates.
// clang-format off
#define REFT_FAULT_POINTS(X) \
  X(capture) X(early_copy) X(mid_chunk) X(before_seal) X(after_seal) X(after_vote) X(gate) \
  X(after_commit) X(restore_agree) X(restore_copy) X(restore_done) X(collective)
// clang-format on

enum class FaultPoint : uint8_t {
#define REFT_FAULT_ENUM(name) name,
  REFT_FAULT_POINTS(REFT_FAULT_ENUM)
#undef REFT_FAULT_ENUM
};

namespace fault_detail {
extern std::atomic<bool> armed;
extern std::atomic<int64_t> step;
void hit(FaultPoint point, int64_t step) noexcept;
}  // namespace fault_detail

// Arms the points for this process. An empty spec disarms.
void configureFaults(const std::string& spec, int rank);

// The step that this process has completed, for points without a step of their own (`collective`).
inline void setFaultStep(int64_t step) noexcept {
  fault_detail::step.store(step, std::memory_order_relaxed);
}
inline int64_t faultStep() noexcept {
  return fault_detail::step.load(std::memory_order_relaxed);
}

// May not return.
inline void faultPoint(FaultPoint point, int64_t step) noexcept {
  if (fault_detail::armed.load(std::memory_order_relaxed)) {
    fault_detail::hit(point, step);
  }
}

}  // namespace reft
