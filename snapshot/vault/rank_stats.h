// Page 1 of a vault: counters that the rank moves, and that the agent and the tools read.
//
// Threads: relaxed atomics, one writer, any readers. Fields are not consistent with each other.
// Errors:  none.
#pragma once

#include <atomic>
#include <cstdint>

namespace reft {

// X(name) in the order of the file: append only.
// clang-format off
#define REFT_RANK_STATS(X) \
  X(pid) X(incarnation) X(attempt) X(steps) X(step_ns) X(step_end_ns) X(captured) X(sealed) \
  X(dropped) X(skipped) X(sealed_step) X(committed_step) X(commit_ns) X(bytes_copied) X(copy_ns) \
  X(gate_ns) X(gate_last_ns) X(capture_ns) X(capture_last_ns) X(early_bytes) X(payload_bytes) \
  X(state_bytes) X(slot_bytes) X(plans) X(restored_step) X(unprotected) X(errors) \
  X(gate_copied_bytes) X(object_bytes) X(restore_ns) X(at_once_copied_bytes) X(gap_copied_bytes) \
  X(compute_copied_bytes) X(communication_copied_bytes) X(forecast_error_ppm) X(op_events_lost) \
  X(every) X(overhead_ppm) X(overhead_noise_ppm) X(forecast_last_ppm) X(foretold_gap_ns) \
  X(unforetold_gap_ns) X(forecast_steps) X(device_gate_ns) X(device_gate_last_ns) X(on_device) \
  X(recomputing_step) X(resume_verdict) X(moved) X(oom_mark) X(given_up) \
  X(restoring_step) X(restoring_way) X(restoring_tries) X(started_at) X(resumes_world) \
  X(restored_memory_bytes) X(restored_storage_bytes) X(restored_received_bytes)
// clang-format on

struct RankStats {
#define REFT_STATS_FIELD(name) std::atomic<uint64_t> name;
  REFT_RANK_STATS(REFT_STATS_FIELD)
#undef REFT_STATS_FIELD
  char note[512];  // newest message for a person; NUL-terminated, may be torn
};

}  // namespace reft
