// Simulates a training job. Each simulated rank has its own Placer and ScheduleModel, the classes
// that a real rank uses. Time is a number; the same options give the same result.
//
// Modelled: dependencies between ranks (messages and collectives), links with latency and
// bandwidth, work with jitter, and the slowdown of compute and communication by copies. Not
// modelled: links shared between ranks, memory limits, the cost of launching copies, failures.
// docs/placement.md has the details.
//
// Threads: runSimulation() is re-entrant and single-threaded. Errors: InvalidArgument.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "intercept/record/op_log.h"
#include "snapshot/cost/cadence.h"
#include "snapshot/cost/control_steps.h"
#include "snapshot/placement/placer.h"
#include "snapshot/placement/simulate/schedule.h"

namespace reft::simulate {

struct SimulationOptions {
  ScheduleSpec schedule;
  PlacerOptions placer;  // the simulator sets bytes_per_sec and the kPaper fields
  uint64_t snapshot_bytes = uint64_t{512} << 20;  // per rank and snapshot; 0: no snapshots
  uint64_t at_once_bytes = 0;  // part that is copied before the program point returns
  // Above 0: snapshots become less frequent if their overhead exceeds this fraction, as in a real
  // job (cadence.h; rank 0 decides).
  double overhead_limit = 0;
  uint32_t control_every = 64;
  double copy_bytes_per_sec = 10e9;
  // Slowdown factor of work that overlaps with a copy at full rate.
  double compute_slowdown = 1.3;
  double communication_slowdown = 1.3;
  double jitter = 0.02;  // relative standard deviation of each piece of work
  uint64_t seed = 1;
  int steps = 40;
  int warm_up_steps = 10;   // first steps, not counted in the results
  int change_at_step = -1;  // first step with work times `change_factor`; -1: never
  double change_factor = 1.0;
  int trace_rank = -1;  // rank whose op log is returned: stage + replica * stages; -1: none
};

struct SimulationResult {
  double iteration_ns = 0;              // mean over the counted steps
  double bubble_ns = 0;                 // per rank and step: waiting for messages
  double exposed_communication_ns = 0;  // per rank and step: waiting for collectives
  // Per rank and step: training stalled for copies (at the program point or the gate).
  double stall_ns = 0;
  // Bytes by the actual activity of the rank during the copy, over all ranks and counted steps.
  // kAtOnce: at the program point; kGap: idle in a bubble; kCommunication: a collective in flight
  // or waited for.
  std::array<double, kTiers> bytes{};
  double bytes_in_gaps_share = 0;  // share of all copied bytes
  double snapshots_per_step = 0;
  double every = 1;           // cadence at the end of the run
  Overhead overhead;          // measured by rank 0; only with `overhead_limit`
  double error_median = 0;    // gap forecasts: median over the ranks of their median errors
  double error_worst = 0;     // gap forecasts: median error of the worst rank
  double foretold_share = 0;  // share of the gap time of the last step that was forecast
  // Longest time, in chunks, that a copy ran past the end of the gap in which it was granted
  // (policies gap and paper).
  double longest_overrun_chunks = 0;
  std::vector<double> step_ns;  // step times of rank 0, all steps
  // Gap forecast error of each step but the last, weighted by gap length, on rank `trace_rank` or
  // 0; -1: no gap forecast.
  std::vector<double> step_errors;
  std::vector<OpEntry> trace;
};

SimulationResult runSimulation(const SimulationOptions& options);

}  // namespace reft::simulate
