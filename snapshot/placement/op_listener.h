// Tells the first copy thread when to copy: reads from the ring of op events what the rank does,
// keeps a Placer informed, and asks it. `gap` waits for the Placer's grants; `eager` and `sync` are
// never held up, but the same is learnt, so that one can see into which tier their bytes fell.
//
// Only time depends on it: a snapshot whose events were lost (a full ring, an event that is still
// being written) is copied at once, and the gate copies the rest.
//
// The device here is the CPU: it idles while the host is blocked in a wait for any reason, because
// a waiting core is what a copy needs. (On a GPU, waits for collectives would keep the link busy.)
//
// kSnapshot events carry: `ticket` step, `bytes` of the snapshot, `signature` bytes of it that were
// copied before, `group` the PlacementPolicy, `tag` the chunk's bytes. kGate: `at_ns`, and
// `signature` since when the snapshot was waited for. A kBegin of kind kStep is a program point;
// without one before it, kSnapshot is.
//
// Threads: one, the first copy thread. Errors: none are thrown besides std::bad_alloc.
#pragma once

#include <cstdint>
#include <vector>

#include "intercept/record/op_events.h"
#include "snapshot/placement/placer.h"

namespace reft {

class OpListener {
 public:
  // `events` outlives it. Events that are in the ring already are discarded.
  explicit OpListener(OpEvents& events);

  // Reads the events since the last call.
  void update();
  // What of the snapshot of `step` may be copied now; see Grant. Call update() before.
  Grant ask(int64_t step, int64_t now_ns);
  void copied(uint64_t bytes, Tier tier, int64_t begin_ns, int64_t end_ns) {
    placer_.copied(bytes, tier, begin_ns, end_ns);
  }
  // Events to sleep for: they may turn a refusal into a grant.
  uint32_t awaited() const;

  const Placer& placer() const { return placer_; }
  uint64_t steps() const { return steps_; }

 private:
  struct Op {
    uint64_t ticket = 0;
    uint64_t step = 0;
    ScheduleOp op;
    bool done = false;
  };
  static constexpr size_t kOps = 8192;  // the newest ones are known; a power of two

  void beginStep(int64_t now_ns);
  Op* find(uint64_t ticket);  // nullptr: older than what is known

  OpEvents& events_;
  Placer placer_;
  std::vector<Op> ops_;  // by ticket
  uint64_t steps_ = 0;
  uint64_t lost_ = 0;          // events, when the step began
  bool point_passed_ = false;  // the step began with a kStep, and its kSnapshot has not come yet
  int64_t snapshot_step_ = -1;
  uint64_t chunk_bytes_ = 0;
};

}  // namespace reft
