// What one rank needs to know: the settings, read once from the environment table, and who it is.
//
// Threads: values. Errors: from() throws InvalidArgument.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "intercept/base/env.h"
#include "snapshot/engine/engine.h"
#include "snapshot/protect/protection.h"

namespace reft {

struct RankIdentity {
  std::string job;
  int rank = 0;
  int world = 1;
  int nodes = 1;
  uint64_t attempt = 0;      // how often the launcher has started the ranks before
  uint64_t incarnation = 0;  // of this attempt, equal on all ranks
};

// What a value of REFT_SNAPSHOT_PROTECTION asks of the ranks.
struct Redundancy {
  const Protection* stored = nullptr;  // by the ranks themselves; never nullptr
  bool copied = false;                 // the agents of other nodes keep copies
};
// "auto" asks for nothing: ranks have agreed on nothing yet. Throws InvalidArgument.
Redundancy redundancyNamed(std::string_view setting);

struct RankOptions {
  static RankOptions from(const Env& env);

  uint32_t slots = 2;
  uint32_t op_log_records = 0;
  uint32_t copy_threads = 0;  // 0: one, and more once state is on a device
  bool verify_full = false;
  std::chrono::nanoseconds slot_wait{0};
  std::chrono::nanoseconds alarm{0};  // 0: no alarm
  uint64_t chunk_bytes = 0;
  PlacementPolicy policy = PlacementPolicy::kEager;
  uint32_t every = 1;
  uint32_t overhead_percent = 0;  // rank 0's counts for all: it has to be told to the others
  uint32_t control_every = 0;
  Redundancy redundancy;
};

PlacementPolicy policyNamed(const std::string& name);

}  // namespace reft
