#include "snapshot/engine/snapshot_job.h"

#include <array>
#include <utility>

#include "intercept/base/error.h"
#include "snapshot/engine/copier.h"
#include "snapshot/engine/node_affinity.h"

namespace reft {

namespace {

using State = SnapshotJob::State;

constexpr std::array<std::pair<State, State>, 7> kTransitions = {{
    {State::kCopying, State::kCompared},
    {State::kCopying, State::kCopied},
    {State::kCompared, State::kChecked},
    {State::kCopied, State::kChecked},
    {State::kChecked, State::kSealing},
    {State::kSealing, State::kSealed},
    {State::kSealing, State::kDropped},
}};

std::vector<const std::byte*> bytesAt(std::span<const void* const> addresses) {
  std::vector<const std::byte*> result;
  result.reserve(addresses.size());
  for (const void* address : addresses) {
    result.push_back(static_cast<const std::byte*>(address));
  }
  return result;
}

}  // namespace

bool SnapshotJob::allowed(State from, State to) {
  return std::find(kTransitions.begin(), kTransitions.end(), std::pair(from, to)) !=
         kTransitions.end();
}

const char* SnapshotJob::name(State state) {
  switch (state) {
    case State::kCopying: return "copying";
    case State::kCompared: return "compared";
    case State::kCopied: return "copied";
    case State::kChecked: return "checked";
    case State::kSealing: return "sealing";
    case State::kSealed: return "sealed";
    case State::kDropped: return "dropped";
  }
  return "unknown";
}

SnapshotJob::SnapshotJob(const Place& place, const CaptureInput& input, bool verify_full)
    : plan(place.plan),
      step(input.step),
      slot(static_cast<uint32_t>(place.slot)),
      proposal(place.proposal),
      cut(input.cut),
      node(NodeAffinity::currentNode()),
      checkable(input.checkable),
      addresses(bytesAt(input.addresses)),
      verify(plan, step, verify_full) {
  if (input.still) {
    input.still([&] { sample(input); });
  } else {
    sample(input);
  }
}

// By loads, which take a quarter of the time that the kernel takes for so many small parts: the
// thread that trains runs it, and nothing moves memory meanwhile.
void SnapshotJob::sample(const CaptureInput& input) {
  for (uint32_t region = 0; input.versions != nullptr && region < addresses.size(); ++region) {
    if (!input.versions->stands(region)) {
      verify.lost(region);
      fail();
    }
  }
  if (failed()) {
    return;
  }
  group_digests = groupDigests(*plan, addresses, input.devices, step);
  verify.sample(addresses, input.devices, input.versions);
}

SnapshotJob::~SnapshotJob() = default;

void SnapshotJob::to(State next) {
  if (!allowed(state_, next)) {
    throw InvalidArgument("next state of a snapshot that is " + std::string(name(state_)),
                          name(next), "the transitions in snapshot_job.cc");
  }
  state_ = next;
}

bool SnapshotJob::allCopied(bool between_ops) {
  bool checked = false;
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kCompared) {
      to(State::kChecked);
    } else {
      to(State::kCopied);
      if (between_ops) {
        verify.compareVersions();
        to(State::kChecked);
      }
    }
    checked = state_ == State::kChecked;
  }
  changed_.notify_all();
  return checked;
}

bool SnapshotJob::check() {
  const MutexLock lock(mutex_);
  if (state_ != State::kCopied) {
    return false;
  }
  verify.compareVersions();
  to(State::kChecked);
  return true;
}

bool SnapshotJob::compare() {
  const MutexLock lock(mutex_);
  if (state_ != State::kCopying && state_ != State::kCopied) {
    return false;
  }
  verify.compareVersions();
  to(state_ == State::kCopying ? State::kCompared : State::kChecked);
  return state_ == State::kChecked;
}

bool SnapshotJob::claim() {
  const MutexLock lock(mutex_);
  if (state_ != State::kChecked) {
    return false;
  }
  to(State::kSealing);
  return true;
}

void SnapshotJob::finish(bool sealed) {
  {
    const MutexLock lock(mutex_);
    to(sealed ? State::kSealed : State::kDropped);
  }
  changed_.notify_all();
}

bool SnapshotJob::isCopied() const {
  return state_ != State::kCopying && state_ != State::kCompared;
}

bool SnapshotJob::isFinished() const {
  return state_ == State::kSealed || state_ == State::kDropped;
}

bool SnapshotJob::checked() const {
  const MutexLock lock(mutex_);
  return isCopied() && state_ != State::kCopied;
}

SnapshotJob::State SnapshotJob::state() const {
  const MutexLock lock(mutex_);
  return state_;
}

void SnapshotJob::awaitCopied() {
  const MutexLock lock(mutex_);
  changed_.wait(mutex_, [this]() REQUIRES(mutex_) { return isCopied(); });
}

void SnapshotJob::awaitFinished() {
  const MutexLock lock(mutex_);
  changed_.wait(mutex_, [this]() REQUIRES(mutex_) { return isFinished(); });
}

bool SnapshotJob::awaitFinished(std::chrono::nanoseconds most) {
  const MutexLock lock(mutex_);
  return changed_.wait_for(mutex_, most, [this]() REQUIRES(mutex_) { return isFinished(); });
}

}  // namespace reft
