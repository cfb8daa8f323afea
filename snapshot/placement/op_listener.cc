#include "snapshot/placement/op_listener.h"

#include <algorithm>

namespace reft {

namespace {

PlacerOptions optionsOfTheCpu() {
  PlacerOptions options;
  options.policy = PlacementPolicy::kEager;
  options.shared_link = false;
  return options;
}

}  // namespace

OpListener::OpListener(OpEvents& events) : events_(events), placer_(optionsOfTheCpu()), ops_(kOps) {
  OpEvent event;
  while (events_.poll(event)) {
  }
  lost_ = events_.lost();
}

OpListener::Op* OpListener::find(uint64_t ticket) {
  Op& op = ops_[ticket & (kOps - 1)];
  return op.ticket == ticket ? &op : nullptr;
}

void OpListener::beginStep(int64_t now_ns) {
  const uint64_t lost = events_.lost();
  placer_.beginStep(now_ns, 0, 0, /*learn=*/lost == lost_);
  lost_ = lost;
  ++steps_;
}

void OpListener::update() {
  OpEvent event;
  while (events_.poll(event)) {
    switch (event.what) {
      case OpEvent::kBegin: {
        if (event.kind == OpKind::kStep) {
          beginStep(event.at_ns);
          point_passed_ = true;
          break;
        }
        Op& op = ops_[event.ticket & (kOps - 1)];
        op = {event.ticket, steps_,
              scheduleOp(event.kind, event.group, event.peer, event.tag, event.bytes,
                         event.signature),
              false};
        placer_.opBegin(op.op, event.at_ns);
        break;
      }
      case OpEvent::kWaitBegin: {
        const Op* op = find(event.ticket);
        placer_.waitBegin(op != nullptr ? op->op : ScheduleOp{}, event.at_ns);
        break;
      }
      case OpEvent::kWaitEnd: placer_.waitEnd(event.at_ns); break;
      case OpEvent::kDone: {
        // Told twice for an op whose end is noticed in two ways; the model does not know ops of
        // earlier steps.
        Op* op = find(event.ticket);
        if (op != nullptr && !op->done && op->step == steps_) {
          placer_.opDone(op->op, event.at_ns);
        }
        if (op != nullptr) {
          op->done = true;
        }
        break;
      }
      case OpEvent::kSnapshot:
        if (!point_passed_) {
          beginStep(event.at_ns);
        }
        point_passed_ = false;
        snapshot_step_ = static_cast<int64_t>(event.ticket);
        chunk_bytes_ = event.tag;
        placer_.take(static_cast<PlacementPolicy>(event.group), event.tag, event.bytes,
                     event.signature);
        break;
      case OpEvent::kGate:
        placer_.gateDone(static_cast<int64_t>(event.signature), event.at_ns);
        break;
    }
  }
}

Grant OpListener::ask(int64_t step, int64_t now_ns) {
  if (step == snapshot_step_ && placer_.bytesLeft() > 0) {
    return placer_.ask(now_ns);
  }
  Grant grant;
  grant.bytes = std::max<uint64_t>(chunk_bytes_, 1);
  grant.until_ns = Grant::kNever;
  grant.tier = placer_.tier();
  return grant;
}

uint32_t OpListener::awaited() const {
  if (placer_.inGap()) {
    return OpEvents::bit(OpEvent::kWaitEnd);
  }
  uint32_t mask = OpEvents::bit(OpEvent::kWaitBegin);
  if (placer_.model().communicating()) {
    mask |= OpEvents::bit(OpEvent::kDone) | OpEvents::bit(OpEvent::kWaitEnd);
  }
  return mask;
}

}  // namespace reft
