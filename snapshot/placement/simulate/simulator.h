// Runs a training job that does not exist, with the Placer and the ScheduleModel that a real rank
// has, one of each per simulated rank. Time is a number; the same options give the same result.
//
// What is modelled: who waits for whom (messages and collectives), links with a latency and a rate,
// work with jitter, copies that slow compute and communication down while they run. What is not:
// links shared between ranks, memory limits, the cost of launching copies, failures.
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
  PlacerOptions placer;                           // stages, stage and micro_batch_ns are filled in
  uint64_t snapshot_bytes = uint64_t{512} << 20;  // of a rank, per snapshot; 0: no snapshots
  uint64_t at_once_bytes = 0;  // of these, copied before the program point returns
  // Above 0: snapshots become rarer when they cost more than this fraction, as in a job (cadence.h;
  // rank 0 decides).
  double overhead_limit = 0;
  uint32_t control_every = 64;
  double copy_bytes_per_sec = 10e9;
  // A copy at full rate makes what it runs beside take so many times longer.
  double compute_slowdown = 1.3;
  double communication_slowdown = 1.3;
  double jitter = 0.02;  // standard deviation of each piece of work, relative
  uint64_t seed = 1;
  int steps = 40;
  int warm_up_steps = 10;   // not counted
  int change_at_step = -1;  // from here on work takes `change_factor` times as long
  double change_factor = 1.0;
  int trace_rank = -1;  // stage + replica * stages: its op log is returned
};

struct SimulationResult {
  double iteration_ns = 0;              // mean over the counted steps
  double bubble_ns = 0;                 // per rank and step: waiting for messages
  double exposed_communication_ns = 0;  // per rank and step: waiting for collectives
  double stall_ns =
      0;  // per rank and step: training stood still for copies (at the program point, at the gate)
  // Bytes by what the rank was really doing while they were copied, over all ranks and counted
  // steps. kAtOnce: at the program point; kGap: idle in a bubble; kCommunication: a collective was
  // in flight or waited for.
  std::array<double, kTiers> bytes{};
  double bytes_in_gaps_share = 0;  // of all bytes
  double snapshots_per_step = 0;
  double every = 1;           // cadence that the ranks have settled on
  Overhead overhead;          // as rank 0 measures it; only with `overhead_limit`
  double error_median = 0;    // of gap forecasts: median over the ranks of their medians
  double error_worst = 0;     // the worst rank's
  double foretold_share = 0;  // of the gap time of the last step
  double longest_overrun_chunks =
      0;  // past a gap's end, by copies that were granted inside it (policies gap and paper)
  std::vector<double> step_ns;      // of rank 0, all steps
  std::vector<double> step_errors;  // of rank `trace_rank` or 0: error of each step's gaps,
                                    // weighted by their length, but the last; -1: no gap foretold
  std::vector<OpEntry> trace;
};

SimulationResult runSimulation(const SimulationOptions& options);

}  // namespace reft::simulate
