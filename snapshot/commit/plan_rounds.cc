#include "snapshot/commit/plan_rounds.h"

#include <algorithm>

namespace reft {

void PlanRounds::point(int64_t step) {
  std::rotate(points_.begin(), points_.begin() + 1, points_.end());
  points_.back() = step;
  for (std::set<int64_t>* steps : {&voted_, &answered_}) {
    steps->erase(steps->begin(), steps->lower_bound(points_.front()));
  }
  due_for_ = kNone;
  parted_ = false;
}

void PlanRounds::voted(int64_t step) {
  voted_.insert(step);
}

void PlanRounds::outcome(int64_t step, bool plan_anew, bool parted) {
  answered_.insert(step);
  // Votes cast before the ranks last planned speak of the plan before.
  if (step < planned_at_) {
    return;
  }
  const auto note = [step](int64_t& oldest) {
    oldest = oldest == kNone ? step : std::min(oldest, step);
  };
  if (plan_anew || parted) {
    note(asked_);
  }
  if (parted) {
    note(asked_parted_);
  }
}

bool PlanRounds::known() const {
  return !voted_.contains(points_.front()) || answered_.contains(points_.front());
}

void PlanRounds::settle() {
  if (asked_ == kNone || asked_ > points_.front()) {
    return;
  }
  due_for_ = asked_;
  parted_ = asked_parted_ == asked_;
  planned_at_ = points_.back();
  asked_ = asked_parted_ = kNone;
}

}  // namespace reft
