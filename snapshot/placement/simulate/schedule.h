// Training steps as lists of actions, one list per pipeline stage. The simulator runs them.
//
// A job has `stages` x `replicas` ranks. Ranks of a stage are data-parallel replicas of each other;
// ranks of a replica pass activations and gradients to each other. Tensor parallelism is not
// modelled as a dimension: its ranks run in lockstep, so one stands for all of them, and its
// collectives are part of the compute times.
//
// Threads: none. Errors: an invalid specification throws InvalidArgument.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace reft::simulate {

enum class ScheduleKind : uint8_t {
  kGpipe,
  kOneFOneB,
  kInterleaved,  // several model chunks per rank, in Megatron-LM's order
  kZeroBubble,   // backward in two halves; weight gradients fill the cool-down (the memory-neutral
                 // variant, H1)
  kDdp,          // one stage; gradient buckets are reduced during the backward pass
  kFsdp,         // one stage; parameters are gathered one layer ahead, gradients reduce-scattered
};
const char* scheduleName(ScheduleKind kind);
ScheduleKind scheduleNamed(std::string_view name);  // throws InvalidArgument

struct ScheduleSpec {
  ScheduleKind kind = ScheduleKind::kOneFOneB;
  int stages = 4;
  int replicas = 1;
  int micro_batches = 8;
  int chunks_per_rank = 2;  // kInterleaved
  // Forward and backward of one micro-batch through all layers of a rank.
  int64_t forward_ns = 10'000'000;
  int64_t backward_ns = 20'000'000;
  int64_t optimizer_ns = 5'000'000;
  uint64_t activation_bytes = uint64_t{8} << 20;  // per micro-batch, between two stages
  uint64_t gradient_bytes = uint64_t{256} << 20;  // per rank, reduced over its replicas
  int layers = 8;                                 // kDdp: buckets; kFsdp: units
  double link_bytes_per_sec = 10e9;
  int64_t link_latency_ns = 10'000;
};

struct Action {
  enum Kind : uint8_t {
    kCompute,
    kSend,     // returns at once
    kReceive,  // waits
    kStart,    // starts a collective over the replicas; returns at once
    kWait,     // waits for a collective
    kGate,     // before the optimizer step
  };
  Kind kind = kCompute;
  int peer = -1;        // messages: stage of the other side
  uint32_t id = 0;      // message: the same at sender and receiver; collective: number within the
                        // stage, in order of start
  int64_t work_ns = 0;  // kCompute: length of the work; kSend, kStart: time on the link
  uint64_t bytes = 0;
};

struct Schedule {
  std::vector<std::vector<Action>> stages;
  uint32_t messages = 0;
  uint32_t collectives = 0;  // per stage
};

Schedule makeSchedule(const ScheduleSpec& spec);

// Returns the gap lengths of stage `stage` in one step of 1F1B, for equal stages, at least as many
// micro-batches as stages, no jitter and no link time. Their sum is (stages-1)(t_f+t_b) at every
// stage. A stage does not wait between its last backward and the next step, so its idle time there
// is part of the gap before its first forward.
std::vector<int64_t> oneFOneBGaps(const ScheduleSpec& spec, int stage);
// REFT's published estimate of the sum of the gaps.
double paperBubbleNs(const ScheduleSpec& spec, int stage);

}  // namespace reft::simulate
