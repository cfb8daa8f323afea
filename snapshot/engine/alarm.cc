#include "snapshot/engine/alarm.h"

namespace reft {

void Alarm::point(int64_t step, int64_t now_ns) {
  if (!stepped_) {  // a resumed job does not begin at 1
    stepped_ = true;
    protected_step_ = step - 1;
  }
  step_ = step;
  step_ns_ = now_ns;
}

void Alarm::committed(int64_t step, int64_t now_ns) {
  protected_step_ = step;
  protected_ns_ = now_ns;
}

bool Alarm::check(int64_t now_ns, uint64_t ops, uint64_t every) {
  const int64_t points = step_ - protected_step_;
  // The outcome of the newest snapshot may arrive only after the next program point.
  const bool rare_by_plan =
      every > 1 && points <= static_cast<int64_t>(every) + 1 && now_ns - step_ns_ <= limit_ns_;
  const bool stale = now_ns - protected_ns_ > limit_ns_ && !rare_by_plan;
  unprotected_ = stale && (unprotected_ || ops != ops_);
  ops_ = ops;
  return unprotected_;
}

}  // namespace reft
