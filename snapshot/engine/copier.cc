#include "snapshot/engine/copier.h"

#include "snapshot/engine/snapshot_job.h"
#include "snapshot/engine/telemetry.h"

namespace reft {

bool Copier::hasWork() const {
  return next_.load() < job_.plan->chunk_count;
}

void Copier::copyRest() {
  while (copyNext(context_.tier.load(std::memory_order_relaxed))) {
  }
}

void Copier::place() {
  OpListener& listener = context_.listener;
  int64_t begin = 0;
  const Sink sink = [&](uint64_t bytes, Tier tier) {
    const int64_t end = context_.clock.nowNs();
    listener.update();  // whether the gap ended meanwhile
    listener.copied(bytes, tier, begin, end);
  };
  const auto let_go = [&] { return job_.released() || job_.failed() || context_.stopping.load(); };
  bool more = true;
  while (more && hasWork()) {
    listener.update();
    begin = context_.clock.nowNs();
    const Grant grant = listener.ask(job_.step, begin);
    if (grant.bytes == 0 && !let_go()) {
      context_.events.sleep(listener.awaited(), grant.retry_ns, context_.clock, let_go);
      continue;
    }
    context_.tier.store(grant.tier, std::memory_order_relaxed);
    more = copyNext(grant.tier, sink);
  }
  if (hostWaits()) {  // the waits of a host that is ahead of its device say nothing about gaps
    context_.telemetry.forecast(listener.placer().model().errors());
  }
  context_.telemetry.opEventsLost(context_.events.lost());
}

void Copier::release(bool at_gate) {
  if (at_gate) {
    job_.reachGate();
  }
  job_.release();
  context_.wake();
  context_.call_helpers();
}

void Copier::chunkDone() {
  if (left_.fetch_sub(1) == 1) {
    context_.all_copied(job_);
  }
}

}  // namespace reft
