#include "snapshot/commit/slot_book.h"

#include <algorithm>
#include <string>
#include <utility>

#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft {

SlotBook::SlotBook(int slots) {
  if (slots < 1) {
    throw InvalidArgument("slots", std::to_string(slots), "1 or more");
  }
  slots_.resize(static_cast<size_t>(slots));
}

void SlotBook::adopt(int slot, int64_t step, uint64_t incarnation) {
  if (slot < 0 || slot >= slots()) {
    throw InvalidArgument("slot", std::to_string(slot), "0.." + std::to_string(slots() - 1));
  }
  if (last_acquired_ != kNone) {
    throw InvalidArgument("adopt", "after the first acquire", "before it");
  }
  auto& target = slots_[static_cast<size_t>(slot)];
  const auto taken = std::count_if(slots_.begin(), slots_.end(), [&](const Slot& s) {
    return &s != &target && s.state != State::kEmpty;
  });
  if (taken + 1 >= slots()) {
    throw InvalidArgument("adopted slots", std::to_string(taken + 1), "one slot must stay free");
  }
  target = Slot{State::kSealed, true, false, {step, incarnation}};
  logDebug("snapshot", "step ", step, " kept in slot ", slot, " of an earlier incarnation");
}

bool SlotBook::reusable(const Slot& slot) const {
  switch (slot.state) {
    case State::kEmpty:
    case State::kAborted: return true;
    case State::kWriting: return false;
    case State::kSealed: return committed_ != kNone && (slot.adopted || slot.key.step < committed_);
  }
  return false;
}

bool SlotBook::canAcquire() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [this](const Slot& slot) { return reusable(slot); });
}

std::optional<int> SlotBook::acquire(int64_t step, uint64_t incarnation) {
  if (step < 0 || (incarnation_ == incarnation && step <= last_acquired_)) {
    throw InvalidArgument("step", std::to_string(step),
                          "more than " + std::to_string(last_acquired_));
  }
  if (incarnation_ && incarnation_ != incarnation) {
    throw InvalidArgument("incarnation", std::to_string(incarnation),
                          "the same for the life of the book");
  }
  // Void contents first, then what an earlier incarnation left, then the oldest: the newest
  // fall-back lives longest.
  const auto worth = [](const Slot& slot) {
    const int rank = slot.state != State::kSealed ? 0 : slot.adopted ? 1 : 2;
    return std::make_pair(rank, rank == 0 ? 0 : slot.key.step);
  };
  std::optional<int> best;
  for (int i = 0; i < slots(); ++i) {
    const auto& slot = slots_[static_cast<size_t>(i)];
    if (slot.state == State::kWriting) {
      throw InvalidArgument("acquire", "slot " + std::to_string(i) + " in writing",
                            "one slot in writing at a time");
    }
    if (reusable(slot) && (!best || worth(slot) < worth(slots_[static_cast<size_t>(*best)]))) {
      best = i;
    }
  }
  if (best) {
    slots_[static_cast<size_t>(*best)] = Slot{State::kWriting, false, false, {step, incarnation}};
    incarnation_ = incarnation;
    last_acquired_ = step;
    logDebug("snapshot", "step ", step, " acquired slot ", *best);
  } else {
    logDebug("snapshot", "step ", step, " found no free slot: ", undecided(),
             " without an outcome");
  }
  return best;
}

SlotBook::Slot& SlotBook::writing(int slot) {
  if (slot < 0 || slot >= slots() || slots_[static_cast<size_t>(slot)].state != State::kWriting) {
    throw InvalidArgument("slot", std::to_string(slot), "the slot that acquire() returned");
  }
  return slots_[static_cast<size_t>(slot)];
}

void SlotBook::sealed(int slot) {
  auto& target = writing(slot);
  target.state = target.aborted_early ? State::kAborted : State::kSealed;
  logDebug("snapshot", "step ", target.key.step, " sealed in slot ", slot,
           target.aborted_early ? ", aborted meanwhile" : "");
}

void SlotBook::dropped(int slot) {
  Slot& target = writing(slot);
  target.state = State::kEmpty;
  logDebug("snapshot", "step ", target.key.step, " dropped, slot ", slot, " is free");
}

void SlotBook::outcome(int64_t step, uint64_t incarnation, bool committed) {
  if (incarnation_ != incarnation) {
    return;  // of an earlier life of this rank
  }
  for (auto& slot : slots_) {
    if (slot.adopted || slot.key != CommitKey{step, incarnation}) {
      continue;
    }
    logDebug("snapshot", "step ", step, committed ? " committed" : " aborted", ", slot ",
             &slot - slots_.data());
    if (slot.state == State::kWriting) {
      slot.aborted_early = slot.aborted_early || !committed;
    } else if (slot.state == State::kSealed && committed) {
      committed_ = std::max(committed_, step);
    } else if (slot.state == State::kSealed && step > committed_) {
      slot.state = State::kAborted;
    }
  }
}

int64_t SlotBook::newestCommitted() const {
  int64_t newest = committed_;
  if (newest == kNone) {
    for (const auto& slot : slots_) {
      newest = slot.adopted ? std::max(newest, slot.key.step) : newest;
    }
  }
  return newest;
}

size_t SlotBook::undecided() const {
  return static_cast<size_t>(std::count_if(slots_.begin(), slots_.end(), [this](const Slot& slot) {
    return slot.state == State::kSealed && !slot.adopted && slot.key.step > committed_;
  }));
}

bool SlotBook::holds(int slot) const {
  return slots_.at(static_cast<size_t>(slot)).state == State::kSealed;
}

std::optional<int> SlotBook::find(int64_t step, uint64_t incarnation) const {
  for (int i = 0; i < slots(); ++i) {
    const auto& slot = slots_[static_cast<size_t>(i)];
    if (slot.state == State::kSealed && slot.key == CommitKey{step, incarnation}) {
      return i;
    }
  }
  return std::nullopt;
}

}  // namespace reft
