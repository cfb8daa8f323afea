#include "snapshot/engine/engine.h"

#include <algorithm>
#include <utility>

#include "intercept/base/error.h"
#include "intercept/base/fault.h"
#include "snapshot/engine/device_copier.h"
#include "snapshot/engine/host_copier.h"
#include "snapshot/state/agreement.h"

namespace reft {

namespace {

constexpr int64_t kDeviceLookNs = 100'000'000;  // longest time until marks are given back

// Whether each part lies within the objects, and on a device that trains.
bool partsFit(const CaptureInput& input) {
  return std::all_of(input.parts.begin(), input.parts.end(), [&](const ObjectPart& part) {
    return part.offset <= input.objects.size() &&
           part.bytes <= input.objects.size() - part.offset &&
           std::any_of(input.streams.begin(), input.streams.end(),
                       [&](const DeviceStream& stream) { return stream.device == part.device; });
  });
}

// Whether an alarm is wanted, and something tells that training goes on.
bool watches(const EngineOptions& options) {
  return options.alarm.count() > 0 && options.ops_begun != nullptr;
}

}  // namespace

SnapshotEngine::SnapshotEngine(EngineOptions options, Vault& vault, VoteSink vote,
                               const Clock& clock)
    : options_(std::move(options)),
      vault_(vault),
      vote_(std::move(vote)),
      clock_(clock),
      own_events_(options_.events == nullptr ? std::make_unique<OpEvents>() : nullptr),
      telemetry_(vault, options_.incarnation),
      listener_(options_.events == nullptr ? *own_events_ : *options_.events),
      context_{.vault = vault,
               .telemetry = telemetry_,
               .clock = clock,
               .events = options_.events == nullptr ? *own_events_ : *options_.events,
               .listener = listener_,
               .all_copied = [this](SnapshotJob& job) { allCopied(job); },
               .call_helpers = [this] { threads_.callHelpers(); },
               .expect_replays = [this] { expectReplays(); }},
      tracker_(options_.cuda, options_.device_marks, vault, clock),
      policy_(options_.policy),
      book_(static_cast<int>(vault.slots())),
      cost_(options_.cadence, options_.control_every),
      alarm_(options_.alarm, clock.nowNs()),
      slot_wait_(options_.slot_wait),
      patience_(clock.nowNs()),
      threads_(std::max(options_.copy_threads, 1u), context_,
               {.finish =
                    [this](SnapshotJob& job) {
                      finish(job);
                      // A host far ahead of its device leaves no other time for it.
                      learnOfDevice();
                    },
                .idle = [this] { return idle(); },
                .always = [this] { checkAlarm(); }}) {
  telemetry_.cost(cost_.figures());
}

SnapshotEngine::~SnapshotEngine() = default;

void SnapshotEngine::adopt(uint32_t slot, int64_t step, uint64_t incarnation) {
  const MutexLock lock(mutex_);
  book_.adopt(static_cast<int>(slot), step, incarnation);
}

bool SnapshotEngine::prepareParities(std::span<const int> devices) {
  return std::ranges::all_of(devices,
                             [&](int device) { return device < 0 || tracker_.prepareSum(device); });
}

void SnapshotEngine::setTable(SnapshotTable table, bool plan_anew) {
  if (!settle()) {
    throw Unavailable("cannot resize the vault: the device has not finished copying");
  }
  const auto plan = std::make_shared<const SnapshotPlan>(std::move(table), plan_anew);
  {
    const MutexLock lock(mutex_);
    plan_ = nullptr;
  }
  const uint64_t table_bytes = plan->json.size() * 2;
  uint64_t slot_bytes = 0;
  for (uint32_t i = 0; i < vault_.slots(); ++i) {
    bool needed = false;
    {
      const MutexLock lock(mutex_);
      needed = book_.holds(static_cast<int>(i));
    }
    if (!needed) {
      vault_.reserveSlot(i, table_bytes, options_.object_bytes, plan->chunk_count,
                         plan->table.payload_bytes);
    }
    slot_bytes += kPage + table_bytes + options_.object_bytes +
                  plan->chunk_count * sizeof(uint64_t) + plan->table.payload_bytes;
  }
  telemetry_.planned(*plan, slot_bytes);
  const MutexLock lock(mutex_);
  plan_ = plan;
}

bool SnapshotEngine::hasTable() const {
  const MutexLock lock(mutex_);
  return plan_ != nullptr;
}

// --- program point

bool SnapshotEngine::beginPoint(int64_t step, std::span<const DeviceStream> streams) {
  const int64_t now = clock_.nowNs();
  tracker_.beginPoint(step, streams);
  {
    const std::vector<DeviceStep> device_steps = tracker_.takeSteps();
    const MutexLock lock(mutex_);
    alarm_.point(step, now);
    telemetry_.point(step, cost_.beginPoint(step, now, device_steps), now);
  }
  return decide(step);
}

bool SnapshotEngine::decide(int64_t step) {
  bool decides = false;
  {
    const MutexLock lock(mutex_);
    decides = cost_.decidesAt(step);
  }
  if (decides) {
    settle();  // the snapshot before has an outcome only once its vote is cast
  }
  Cadence::Answer answer = Cadence::Answer::kLeave;
  {
    const MutexLock lock(mutex_);
    const bool known =
        !decides || awaitOutcome([this]() REQUIRES(mutex_) { return book_.undecided() == 0; });
    answer = cost_.decide(step, known);
    telemetry_.cost(cost_.figures());
    if (answer == Cadence::Answer::kVoteAgainst) {
      patience_.starve(true);
      meeting_.missed();
    }
    if (answer != Cadence::Answer::kLeave) {
      rounds_.point(step);
      awaitOutcome([this]() REQUIRES(mutex_) { return rounds_.known(); });
      rounds_.settle();
    }
  }
  if (answer == Cadence::Answer::kVoteAgainst) {
    skip(step,
         "the outcome of the previous snapshot is not known yet, so the interval between "
         "snapshots is not known either");
  }
  return answer == Cadence::Answer::kTake;
}

bool SnapshotEngine::awaitOutcome(const std::function<bool()>& ready) {
  const int64_t start = clock_.nowNs();
  if (!ready() && patience_.mayWait(start) &&
      !changed_.wait_for(mutex_, slot_wait_, [&] { return ready() || context_.stopping.load(); })) {
    patience_.waitedInVain(clock_.nowNs() - start);
  }
  return ready();
}

void SnapshotEngine::protectionChanged(std::chrono::nanoseconds slot_wait) {
  const MutexLock lock(mutex_);
  slot_wait_ = slot_wait;
  cost_.restart();
}

bool SnapshotEngine::exceedsAtLongest() const {
  const MutexLock lock(mutex_);
  return cost_.exceedsAtLongest();
}

PlanRound SnapshotEngine::planRound() const {
  const MutexLock lock(mutex_);
  return {rounds_.due(), rounds_.parted()};
}

void SnapshotEngine::endPoint() {
  const int64_t now = clock_.nowNs();
  Cost::Step step;
  {
    const MutexLock lock(mutex_);
    step = cost_.endPoint(now);
  }
  if (tracker_.endPoint(step.block, step.beside_copy, step.point_begin_ns, step.point_end_ns)) {
    context_.wake();  // also without a snapshot: marks are to be given back
  }
}

CaptureResult SnapshotEngine::capture(const CaptureInput& input) {
  const int64_t start = clock_.nowNs();
  // Also for a loop whose gate never ran (optimizers outside torch.optim): steps are never mixed.
  std::string hindrance = settle() ? "" : "the device has not finished copying the step before";
  faultPoint(FaultPoint::capture, input.step);
  if (hindrance.empty() && input.onDevice()) {
    hindrance = beginOnDevice(input);
  }
  SnapshotJob::Place place;
  if (const CaptureResult result = claimSlot(input, hindrance, place);
      result != CaptureResult::kTaken) {
    return result;
  }
  const std::shared_ptr<SnapshotJob> job = makeJob(input, place);
  faultPoint(FaultPoint::early_copy, input.step);
  job->copier->atPoint();
  telemetry_.began(input.step, input.objects.size());
  startCopy(job);
  // With the caller's own work at the point: to find the small state takes longer than all else
  // where the model is small.
  int64_t began = start;
  {
    const MutexLock lock(mutex_);
    began = cost_.pointBegan().value_or(start);
  }
  telemetry_.captured(input.step, began, clock_.nowNs(), input.objects.size());
  return CaptureResult::kTaken;
}

// Why no snapshot can begin; empty: copies wait for this point of the streams.
std::string SnapshotEngine::beginOnDevice(const CaptureInput& input) {
  const DeviceTracker::Begun begun = tracker_.begin(input.streams);
  if (begun == DeviceTracker::Begun::kCapturing) {
    expectReplays();
  }
  tracker_.pointOf(input.step, input.streams);
  switch (begun) {
    case DeviceTracker::Begun::kYes: return "";
    case DeviceTracker::Begun::kCapturing:
    case DeviceTracker::Begun::kCapturingElsewhere: return DeviceCopier::kCapturing;
    case DeviceTracker::Begun::kBroken: break;
  }
  return "snapshots of device memory have ended after an error: " + tracker_.why();
}

CaptureResult SnapshotEngine::claimSlot(const CaptureInput& input, const std::string& hindrance,
                                        SnapshotJob::Place& place) {
  std::optional<int> slot;
  std::string no_slot;
  {
    const MutexLock lock(mutex_);
    if (plan_ == nullptr || input.addresses.size() != plan_->table.regions.size()) {
      return CaptureResult::kNoTable;
    }
    if (!plan_->table.parities.empty() && !tracker_.hasSums(input.devices)) {
      return CaptureResult::kNoTable;  // planned before the state moved there
    }
    if (input.step <= newest_captured_) {
      telemetry_.failed("step " + std::to_string(input.step) +
                        " not captured: it comes after step " + std::to_string(newest_captured_));
      return CaptureResult::kFailed;
    }
    place.plan = plan_;
    if (hindrance.empty()) {
      place.proposal = cost_.proposal();
      slot = acquireSlot(input.step, no_slot);
    }
    newest_captured_ = input.step;
  }
  if (!hindrance.empty()) {
    skip(input.step, hindrance);
    return CaptureResult::kFailed;
  }
  if (!partsFit(input)) {
    if (slot) {
      returnSlot(*slot);
    }
    telemetry_.failed("step " + std::to_string(input.step) +
                      " not captured: a part of its small state exceeds the bounds of that state, "
                      "or is on a device that does not train");
    voteAgainst(input.step);
    return CaptureResult::kFailed;
  }
  if (!slot) {
    skip(input.step, no_slot);
    return CaptureResult::kNoSlot;
  }
  place.slot = *slot;
  if (!prepareSlot(input, place)) {
    returnSlot(*slot);
    telemetry_.dropped(input.step, "");
    voteAgainst(input.step);
    return CaptureResult::kFailed;
  }
  return CaptureResult::kTaken;
}

std::optional<int> SnapshotEngine::acquireSlot(int64_t step, std::string& why_not) {
  const bool is_free = awaitOutcome([this]() REQUIRES(mutex_) { return book_.canAcquire(); });
  patience_.starve(!is_free);
  if (!is_free) {
    meeting_.missed();
    why_not = "no slot became free (the job has not committed the previous snapshot yet)";
    return std::nullopt;
  }
  // Ranks that wait for slots find them free at the same points.
  if (slot_wait_.count() == 0 && !meeting_.isOne(step / static_cast<int64_t>(cost_.every()))) {
    why_not = "slots were in use for some steps, and all ranks go on together at a later one";
    return std::nullopt;
  }
  meeting_.took();
  return book_.acquire(step, options_.incarnation);
}

bool SnapshotEngine::prepareSlot(const CaptureInput& input, const SnapshotJob::Place& place) {
  const auto slot = static_cast<uint32_t>(place.slot);
  const SnapshotPlan& plan = *place.plan;
  if (vault_.lostPages()) {
    telemetry_.failed("the disk under REFT_VAULT_DIR has failed");
    return false;
  }
  uint64_t object_bytes = input.objects.size();
  if (object_bytes > vault_.objectCapacity(slot)) {
    // The whole slot moves, so small state that grows a little every step must not do this every
    // step.
    object_bytes = std::max(options_.object_bytes, object_bytes * 2);
  }
  try {
    vault_.reserveSlot(slot, plan.json.size(), object_bytes, plan.chunk_count,
                       plan.table.payload_bytes);
  } catch (const Error& error) {
    telemetry_.failed(error.what());
    return false;
  }
  if (input.onDevice() && !tracker_.pin(vault_.payload(slot), vault_.payloadCapacity(slot))) {
    telemetry_.failed("snapshots of device memory have ended after an error: " + tracker_.why());
    return false;
  }
  return true;
}

void SnapshotEngine::returnSlot(int slot) {
  const MutexLock lock(mutex_);
  book_.dropped(slot);
}

std::shared_ptr<SnapshotJob> SnapshotEngine::makeJob(const CaptureInput& input,
                                                     const SnapshotJob::Place& place) {
  const auto slot = static_cast<uint32_t>(place.slot);
  const SnapshotPlan& plan = *place.plan;
  vault_.beginSlot(slot, input.step, options_.incarnation, plan.json, plan.json_hash,
                   plan.table.chunk_bytes, plan.table.payload_bytes, plan.chunk_count);
  vault_.putObjects(slot, input.objects);
  auto job = std::make_shared<SnapshotJob>(place, input, options_.verify_full);
  const bool on_device = input.onDevice();
  if (on_device) {
    threads_.grow(options_.device_copy_threads);
    job->copier = std::make_unique<DeviceCopier>(context_, *job, tracker_, input);
  } else {
    job->copier = std::make_unique<HostCopier>(context_, *job);
  }
  const MutexLock lock(mutex_);
  if (on_device && !cost_.onDevices()) {
    cost_.moveToDevices(input.step);
    telemetry_.onDevices();
  }
  const Copier::Way way = job->copier->way({.policy = policy_.load(),
                                            .control = cost_.wantsControl(),
                                            .gated = input.gated,
                                            .replays = cost_.replays()});
  job->policy = way.policy;
  job->control = way.control;
  if (on_device && !input.gated) {
    cost_.expectReplays();
  }
  cost_.beginSnapshot(way.control);
  return job;
}

// Makes the job known to the copy threads.
void SnapshotEngine::startCopy(const std::shared_ptr<SnapshotJob>& job) {
  const SnapshotPlan& plan = *job->plan;
  Copier& copier = *job->copier;
  const bool all_copied = copier.done();
  const bool at_once = job->policy == PlacementPolicy::kSync;
  context_.events.push(
      {.what = OpEvent::kSnapshot,
       .group = static_cast<uint32_t>(job->policy),
       .tag = static_cast<uint32_t>(std::min<uint64_t>(plan.table.chunk_bytes, UINT32_MAX)),
       .ticket = static_cast<uint64_t>(job->step),
       .at_ns = clock_.nowNs(),
       .bytes = plan.table.payload_bytes,
       .signature = at_once ? plan.table.payload_bytes : plan.earlyBytes()});
  threads_.post(job);
  if (all_copied) {
    allCopied(*job);
  } else if (copier.placed()) {
    context_.wake();
  } else {
    copier.release(/*at_gate=*/false);
  }
  const bool waits = at_once && copier.hostWaits();
  if (waits) {
    copier.copyRest();
  }
  if (waits || all_copied) {
    settle();
  }
}

void SnapshotEngine::leaveOut(int64_t step) {
  settle();
  {
    const MutexLock lock(mutex_);
    newest_captured_ = std::max(newest_captured_, step);
  }
  expectReplays();
  skip(step, "the optimizer's step is captured into a graph");
}

void SnapshotEngine::passOver(int64_t step, const std::string& why, bool plan_anew) {
  settle();
  {
    const MutexLock lock(mutex_);
    newest_captured_ = std::max(newest_captured_, step);
  }
  skip(step, why, plan_anew);
}

void SnapshotEngine::expectReplays() {
  const MutexLock lock(mutex_);
  cost_.expectReplays();
}

// There will be no snapshot of `step`.
void SnapshotEngine::skip(int64_t step, const std::string& why, bool plan_anew) {
  telemetry_.skipped(step, why);
  voteAgainst(step, plan_anew);
}

void SnapshotEngine::voteAgainst(int64_t step, bool plan_anew) {
  wire::Ballot ballot{};
  ballot.step = step;
  {
    const MutexLock lock(mutex_);
    plan_anew = plan_anew || (plan_ != nullptr && plan_->plan_anew);
  }
  ballot.plan_anew = plan_anew ? 1 : 0;
  vote(ballot);
}

void SnapshotEngine::vote(wire::Ballot ballot) {
  ballot.incarnation = options_.incarnation;
  {
    const MutexLock lock(mutex_);
    rounds_.voted(ballot.step);
  }
  vote_(ballot);
  faultPoint(FaultPoint::after_vote, ballot.step);
}

// --- until the vote

// A version counter moves when an op has ended. One that was under way while its tensor was copied
// shows only once the training thread is between two ops: when it is in capture() or gate(), or
// calls check().
void SnapshotEngine::allCopied(SnapshotJob& job) {
  const bool between_ops = job.atGate() || job.policy == PlacementPolicy::kSync;
  const bool nothing_late = job.plan->chunk_count == job.plan->early_chunks;
  if (job.allCopied(between_ops || nothing_late || options_.ask_check == nullptr || job.failed())) {
    context_.wake();
  } else if (job.checkable) {
    options_.ask_check();
  }
}

void SnapshotEngine::check() {
  const auto job = threads_.job();
  if (job != nullptr && job->check()) {
    context_.wake();
  }
}

int64_t SnapshotEngine::gate(std::span<const DeviceStream> streams) {
  const int64_t start = clock_.nowNs();
  tracker_.stepOn(streams);
  const auto job = finishCopy(streams);
  tracker_.gate(streams, [] {});  // of a snapshot that was finished before
  const int64_t waited = job == nullptr ? 0 : clock_.nowNs() - start;
  if (waited != 0) {
    telemetry_.gated(job->step, start, waited);
  }
  context_.events.push({.what = OpEvent::kGate,
                        .at_ns = waited == 0 ? start : clock_.nowNs(),
                        .signature = static_cast<uint64_t>(start)});
  return waited;
}

// Until live memory is not needed any more, or the streams wait. nullptr: nothing was under way.
std::shared_ptr<SnapshotJob> SnapshotEngine::finishCopy(std::span<const DeviceStream> streams) {
  auto job = threads_.job();
  if (job != nullptr && !job->checked()) {
    faultPoint(FaultPoint::gate, job->step);
    job->copier->gate(streams);
  }
  return job;
}

bool SnapshotEngine::settleWithin(std::chrono::nanoseconds most) {
  const auto job = finishCopy({});
  if (job == nullptr) {
    return true;
  }
  if (!job->copier->hostWaits()) {
    // A device that hangs must not make this thread hang, and not for longer than once.
    const auto wait =
        job->given_up ? std::chrono::nanoseconds(0) : std::min(most, options_.device_wait);
    const bool finished = job->awaitFinished(wait);
    job->given_up = !finished && (job->given_up || wait == options_.device_wait);
    return finished;
  }
  if (job->claim()) {
    finish(*job);
  } else {
    job->awaitFinished();
  }
  return true;
}

void SnapshotEngine::finish(SnapshotJob& job) {
  const uint64_t finishing = telemetry_.finishing(job.step, clock_.nowNs());
  const bool whole = !job.failed() && !vault_.lostPages();
  if (whole) {
    job.verify.compareSamples(vault_.payload(job.slot));
  }
  const std::vector<uint32_t> late = job.verify.late();
  bool good = whole && late.empty();
  wire::Ballot ballot{};
  ballot.step = job.step;
  ballot.yes = good ? 1 : 0;
  ballot.plan_anew = job.plan->plan_anew ? 1 : 0;
  if (good) {
    ballot.cut = job.cut;
    ballot.proposal = job.proposal;
    ballot.replicas = agreementOf(job.plan->table, job.plan->group_layouts, job.group_digests);
    vault_.setBallot(job.slot, ballot.cut, ballot.replicas, ballot.proposal, job.plan->plan_anew);
    faultPoint(FaultPoint::before_seal, job.step);
    vault_.sealSlot(job.slot, job.group_digests, clock_.nowNs());
    telemetry_.sealed(job.step);
    faultPoint(FaultPoint::after_seal, job.step);
    good = !vault_.lostPages();  // what was sealed is in the file, too
    if (!good) {
      ballot.yes = 0;
      vault_.clearSlot(job.slot);
    }
  } else {
    vault_.clearSlot(job.slot);
    const bool lost = job.verify.anyLost();
    telemetry_.dropped(job.step, late.empty()
                                     ? ""
                                     : job.plan->table.regions[late.front()].name +
                                           (lost ? " was moved or freed" : " was written") +
                                           " between the optimizer step and its copy; "
                                           "it is copied before the step returns from "
                                           "now on");
    if (lost) {
      telemetry_.moved();
    }
  }
  telemetry_.finished(finishing, clock_.nowNs(), good, job.copy_ns.load());
  {
    const MutexLock lock(mutex_);
    const auto slot = static_cast<int>(job.slot);
    if (good) {
      book_.sealed(slot);
    } else {
      book_.dropped(slot);
    }
    late_.insert(late_.end(), late.begin(), late.end());
  }
  vote(ballot);
  threads_.retire(job);
  job.finish(good);
  changed_.notify_all();
}

uint64_t SnapshotEngine::giveBack(bool everything) {
  if (!settle()) {
    return 0;  // a device still copies into one
  }
  uint64_t bytes = 0;
  const MutexLock lock(mutex_);
  plan_ = nullptr;
  for (uint32_t i = 0; i < vault_.slots(); ++i) {
    if (everything || book_.isFree(static_cast<int>(i))) {
      bytes += vault_.releaseSlot(i);
    }
  }
  return bytes;
}

bool SnapshotEngine::busyOnDevice() {
  const auto job = threads_.job();
  return job != nullptr && !job->copier->hostWaits();
}

void SnapshotEngine::outcome(const wire::Ballot& ballot) {
  const bool committed = ballot.yes != 0;
  {
    const MutexLock lock(mutex_);
    book_.outcome(ballot.step, ballot.incarnation, committed);
    patience_.outcome();
    if (ballot.incarnation != options_.incarnation) {
      return;
    }
    newest_settled_ = std::max(newest_settled_, ballot.step);
    rounds_.outcome(ballot.step, ballot.plan_anew != 0, !committed && ballot.replicas != 0);
    if (committed) {
      cost_.committed(ballot.step, ballot.proposal);
    } else {
      telemetry_.notCommitted(ballot.step, ballot.cut != 0, ballot.replicas != 0);
    }
    if (committed && ballot.step > committed_step_.load()) {
      const int64_t now = clock_.nowNs();
      committed_step_.store(ballot.step);
      alarm_.committed(ballot.step, now);
      telemetry_.committed(ballot.step, now);
    }
  }
  changed_.notify_all();
  if (committed) {
    faultPoint(FaultPoint::after_commit, ballot.step);
  }
}

std::vector<uint32_t> SnapshotEngine::takeLateWritten() {
  settle();  // at the program point, so it is a part of what a capture costs
  std::vector<uint32_t> result;
  {
    const MutexLock lock(mutex_);
    result.swap(late_);
  }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

bool SnapshotEngine::drain(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  settleWithin(timeout);
  const MutexLock lock(mutex_);
  return changed_.wait_until(
      mutex_, end, [this]() REQUIRES(mutex_) { return newest_settled_ >= newest_captured_; });
}

// --- first copy thread

void SnapshotEngine::learnOfDevice() {
  tracker_.learn([this](const auto& learned) { telemetry_.device(learned); });
}

int64_t SnapshotEngine::idle() {
  listener_.update();
  learnOfDevice();
  const int64_t now = clock_.nowNs();
  const auto period =
      std::max<std::chrono::nanoseconds>(options_.alarm / 4, std::chrono::seconds(1));
  const int64_t alarm_ns = watches(options_) ? now + period.count() : Grant::kNever;
  return tracker_.followsDevice() ? std::min(alarm_ns, now + kDeviceLookNs) : alarm_ns;
}

void SnapshotEngine::checkAlarm() {
  if (!watches(options_)) {
    return;
  }
  bool before = false;
  bool unprotected = false;
  {
    const MutexLock lock(mutex_);
    const uint64_t ops = options_.ops_begun();
    before = alarm_.unprotected();
    unprotected = alarm_.check(clock_.nowNs(), ops, cost_.every());
    telemetry_.unprotected(unprotected);
  }
  if (unprotected != before && options_.on_alarm) {
    options_.on_alarm(unprotected);
  }
}

}  // namespace reft
