#include "snapshot/engine/engine.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "intercept/base/error.h"
#include "intercept/base/fault.h"
#include "snapshot/engine/engine_job.h"
#include "snapshot/engine/node_affinity.h"
#include "snapshot/placement/op_listener.h"
#include "snapshot/vault/copy.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"

namespace reft {

namespace {

constexpr uint32_t kDigestSamples = 256;  // cache lines per sharding group
constexpr int kCopyNice = 10;
constexpr int64_t kSameSpanNs = 100'000;  // chunks that follow each other so soon are one span
constexpr int64_t kToldGateNs = 1000;
constexpr int64_t kRunPerVainWait = 100;  // waits in vain take a hundredth of the run
// A device stands idle while the snapshot of a control step is copied, a processor core does not,
// so there they are rarer.
constexpr uint32_t kRarerOnDevices = 8;
constexpr int64_t kWarmUpSteps = 3;  // not measured: memory is touched for the first time
constexpr int64_t kDeviceLookNs = 100'000'000;

// Copies yield to training; the gate helps with what is left, so a low priority cannot delay the
// next step for long. Relative to training, which may itself run with another priority than 0.
void beginCopyThread() {
  ::pthread_setname_np(::pthread_self(), "reft-copy");
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  ::setpriority(PRIO_PROCESS, thread, ::getpriority(PRIO_PROCESS, thread) + kCopyNice);
}

}  // namespace

SnapshotEngine::SnapshotEngine(EngineOptions options, Vault& vault, VoteSink vote,
                               const Clock& clock)
    : options_(std::move(options)),
      vault_(vault),
      vote_(std::move(vote)),
      clock_(clock),
      own_events_(options_.events == nullptr ? std::make_unique<OpEvents>() : nullptr),
      events_(options_.events == nullptr ? *own_events_ : *options_.events),
      placement_(std::make_unique<OpListener>(events_)),
      policy_(options_.policy),
      book_(static_cast<int>(vault.slots())),
      cadence_(options_.cadence),
      control_steps_(options_.control_every) {
  vault_.stats().incarnation.store(options_.incarnation);
  vault_.stats().committed_step.store(static_cast<uint64_t>(-1));
  vault_.stats().sealed_step.store(static_cast<uint64_t>(-1));
  measured_every_ = cadence_.every();
  tellOverhead();
  protected_ns_ = started_ns_ = clock_.nowNs();
  threads_.emplace_back([this] { decide(); });
  for (uint32_t i = 1; i < options_.copy_threads; ++i) {
    threads_.emplace_back([this] { help(); });
  }
}

SnapshotEngine::~SnapshotEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true);
    if (job_ != nullptr) {
      job_->failed.store(true);
    }
  }
  help_wanted_.notify_all();
  events_.wake();
  for (std::thread& thread : threads_) {
    thread.join();
  }
  vault_.beforeMove(nullptr);
}

void SnapshotEngine::note(const std::string& text) {
  RankStats& stats = vault_.stats();
  std::snprintf(stats.note, sizeof(stats.note), "%s", text.c_str());
}

void SnapshotEngine::vote(int64_t step, uint64_t cut, bool sealed, uint8_t wish) {
  wire::Ballot ballot{};
  ballot.step = step;
  ballot.incarnation = options_.incarnation;
  ballot.cut = cut;
  ballot.yes = sealed ? 1 : 0;
  ballot.wish = wish;
  vote_(ballot);
  faultPoint(FaultPoint::after_vote, step);
}

// There will be no snapshot of `step`.
void SnapshotEngine::skip(int64_t step, const std::string& why) {
  vault_.stats().skipped.fetch_add(1);
  note("step " + std::to_string(step) + " skipped: " + why);
  vote(step, 0, false);
}

void SnapshotEngine::adopt(uint32_t slot, int64_t step, uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  book_.adopt(static_cast<int>(slot), step, incarnation);
}

void SnapshotEngine::setTable(SnapshotTable table) {
  if (!settle()) {
    throw Unavailable("the vault cannot be laid out anew: the device has not finished copying");
  }
  auto plan = std::make_shared<const Plan>(std::move(table));
  {
    const std::lock_guard lock(mutex_);
    plan_ = nullptr;
  }
  uint64_t slot_bytes = 0;
  for (uint32_t i = 0; i < vault_.slots(); ++i) {
    bool needed = false;
    {
      const std::lock_guard lock(mutex_);
      // A slot that holds a snapshot (sealed, or adopted at restore) is grown when the book gives
      // it out.
      const auto raw = VaultReader(vault_.fd()).slots();
      for (const SlotView& view : raw) {
        needed |= view.index == i && book_.find(view.step, view.incarnation) == static_cast<int>(i);
      }
    }
    if (!needed) {
      vault_.reserveSlot(i, plan->json.size() * 2, options_.object_bytes, plan->chunk_count,
                         plan->table.payload_bytes);
    }
    slot_bytes += kPage + plan->json.size() * 2 + options_.object_bytes + plan->chunk_count * 8 +
                  plan->table.payload_bytes;
  }
  RankStats& stats = vault_.stats();
  uint64_t state_bytes = 0;
  for (const RegionInfo& region : plan->table.regions) {
    state_bytes += region.bytes;
  }
  stats.state_bytes.store(state_bytes);
  stats.payload_bytes.store(plan->table.payload_bytes);
  stats.early_bytes.store(plan->table.early_bytes);
  stats.slot_bytes.store(slot_bytes);
  stats.plans.fetch_add(1);
  const std::lock_guard lock(mutex_);
  plan_ = std::move(plan);
}

bool SnapshotEngine::prepareSlot(int slot, const Plan& plan, size_t object_bytes) {
  if (object_bytes > vault_.objectCapacity(static_cast<uint32_t>(slot))) {
    // The whole slot moves, so small state that grows a little every step must not do this every
    // step.
    object_bytes = std::max<size_t>(options_.object_bytes, object_bytes * 2);
  }
  try {
    vault_.reserveSlot(static_cast<uint32_t>(slot), plan.json.size(), object_bytes,
                       plan.chunk_count, plan.table.payload_bytes);
    return true;
  } catch (const Error& error) {
    note(error.what());
    vault_.stats().errors.fetch_add(1);
    return false;
  }
}

// What the state looks like at the program point: versions, samples of each piece, digests of each
// sharding group.
void SnapshotEngine::sample(Job& job, const CaptureInput& input) {
  job.versions = input.versions;
  job.checkable = input.checkable && options_.ask_check != nullptr;
  if (job.versions != nullptr) {
    job.versions_at_capture.reserve(input.addresses.size());
    for (size_t i = 0; i < input.addresses.size(); ++i) {
      job.versions_at_capture.push_back(job.versions->version(i));
    }
  }
  const Plan& plan = *job.plan;
  const auto seed = static_cast<uint64_t>(input.step) * 0x9E3779B97F4A7C15ull;
  job.sample_hashes.reserve(plan.table.pieces.size());
  for (size_t i = 0; i < plan.table.pieces.size(); ++i) {
    const Piece& piece = plan.table.pieces[i];
    job.sample_hashes.push_back(
        !job.sampled(piece.region)
            ? 0
            : sampleHash(job.addresses[piece.region] + piece.begin, piece.end - piece.begin,
                         options_.verify_full ? 0 : plan.samples[i], seed + i));
  }
  for (size_t g = 0; g < plan.group_regions.size(); ++g) {
    const auto& regions = plan.group_regions[g];
    if (std::any_of(regions.begin(), regions.end(),
                    [&](uint32_t r) { return job.isOnDevice(r); })) {
      job.group_digests.push_back(0);  // until its lines have landed
      if (g < kMaxGroupDigests && plan.table.groups[g].ranks.size() > 1) {
        job.replica_lines.emplace_back(g, replicaLines(plan.group_bytes[g], seed));
      }
      continue;
    }
    const uint64_t bytes =
        std::accumulate(plan.group_bytes[g].begin(), plan.group_bytes[g].end(), uint64_t{0});
    uint64_t digest = seed;
    uint64_t position =
        0;  // in the group, not in the table: members have different private regions in between
    for (const uint32_t r : regions) {
      const uint64_t size = plan.table.regions[r].bytes;
      const auto samples = static_cast<uint32_t>(
          std::max<uint64_t>(1, kDigestSamples * size / std::max<uint64_t>(bytes, 1)));
      digest = digest * 31 + sampleHash(job.addresses[r], size, samples, seed + position++);
    }
    job.group_digests.push_back(digest);
  }
}

CaptureResult SnapshotEngine::capture(const CaptureInput& input) {
  const int64_t start = clock_.nowNs();
  // Also for a loop whose gate never ran (optimizers outside torch.optim): two steps are never
  // mixed.
  std::string hindrance = settle() ? "" : "the device has not finished copying the step before";
  RankStats& stats = vault_.stats();
  faultPoint(FaultPoint::capture, input.step);
  const bool on_device = std::any_of(input.devices.begin(), input.devices.end(),
                                     [](int device) { return device >= 0; });
  if (hindrance.empty() && on_device) {
    hindrance = beginOnDevices(input.streams);
    if (marked_step_ != input.step || input.streams.size() != 1 ||
        input.streams.front() != marked_) {
      pointOnDevice(input.step, input.streams);  // the first one, or the state has moved
    }
  }
  auto job = std::make_shared<Job>();
  std::optional<int> slot;
  {
    std::unique_lock lock(mutex_);
    if (plan_ == nullptr || input.addresses.size() != plan_->table.regions.size()) {
      return CaptureResult::kNoTable;
    }
    if (input.step <= newest_captured_) {
      stats.errors.fetch_add(1);
      note("step " + std::to_string(input.step) + " not captured: it comes after step " +
           std::to_string(newest_captured_));
      return CaptureResult::kFailed;
    }
    job->plan = plan_;
    if (hindrance.empty()) {
      starved_ = !awaitOutcome(lock, [this] { return book_.canAcquire(); });
      job->wish = cadence_.wish();
      slot = book_.acquire(input.step, options_.incarnation);
    }
    newest_captured_ = input.step;
  }
  if (!hindrance.empty()) {
    skip(input.step, hindrance);
    return CaptureResult::kFailed;
  }
  if (std::any_of(input.parts.begin(), input.parts.end(), [&](const ObjectPart& part) {
        return part.offset > input.objects.size() ||
               part.bytes > input.objects.size() - part.offset ||
               std::none_of(
                   input.streams.begin(), input.streams.end(),
                   [&](const DeviceStream& stream) { return stream.device == part.device; });
      })) {
    {
      const std::lock_guard lock(mutex_);
      if (slot) {
        book_.dropped(*slot);
      }
    }
    stats.errors.fetch_add(1);
    note("step " + std::to_string(input.step) +
         " not captured: a part of its small state lies where nothing else of it does");
    vote(input.step, 0, false);
    return CaptureResult::kFailed;
  }
  const Plan& plan = *job->plan;
  if (!slot) {
    skip(input.step, "no slot became free (the job has not committed the one before)");
    return CaptureResult::kNoSlot;
  }
  job->slot = *slot;
  job->step = input.step;
  job->node = NodeAffinity::currentNode();
  if (!prepareSlot(*slot, plan, input.objects.size()) || (on_device && !pinSlot(*slot))) {
    {
      const std::lock_guard lock(mutex_);
      book_.dropped(*slot);
    }
    stats.dropped.fetch_add(1);
    vote(input.step, 0, false);
    return CaptureResult::kFailed;
  }
  vault_.beginSlot(static_cast<uint32_t>(*slot), input.step, options_.incarnation, plan.json,
                   plan.json_hash, plan.table.chunk_bytes, plan.table.payload_bytes,
                   plan.chunk_count);
  vault_.putObjects(static_cast<uint32_t>(*slot), input.objects);
  vault_.setBallot(static_cast<uint32_t>(*slot), input.cut, job->wish);
  job->cut = input.cut;
  job->addresses.reserve(input.addresses.size());
  for (const void* address : input.addresses) {
    job->addresses.push_back(static_cast<const std::byte*>(address));
  }
  if (on_device) {
    job->devices.assign(input.devices.begin(), input.devices.end());
    job->streams.assign(input.streams.begin(), input.streams.end());
    job->parts.assign(input.parts.begin(), input.parts.end());
    // Streams on which other optimizers have stepped are not those that are current here.
    std::vector<DeviceStream> others = stepped_;
    others.insert(others.end(), input.writers.begin(), input.writers.end());
    for (const DeviceStream& one : others) {
      const auto known = [&](const std::vector<DeviceStream>& in) {
        return std::find(in.begin(), in.end(), one) != in.end();
      };
      // What a stream is captured for does not run now.
      if (!known(job->streams) && !known(job->writers) &&
          device_copy_->capturing({&one, 1}) == DeviceCopy::Capture::kNone) {
        job->writers.push_back(one);
      }
    }
    job->object_bytes = input.objects.size();
  }
  if (job->onDevice() && !on_device_) {
    on_device_ = true;
    stats.on_device.store(1);
    control_steps_.lengthen(kRarerOnDevices);
    meter_.restart(
        control_steps_.block(input.step));  // what was measured until now were the host's times
  }
  job->placed = job->onDevice() && marked_step_ == input.step;
  // The step of a control step begins when the copy is done, as every step does under `sync`; on a
  // device it is copied at the gate, because the host would get ahead while its device waits at the
  // program point, and such a step would be shorter than others.
  const bool control =
      control_ && (job->onDevice() ? job->placed && input.gated && !replays_ : true);
  job->policy = control && !job->onDevice() ? PlacementPolicy::kSync : policy_.load();
  if (!input.gated && job->onDevice()) {
    expectReplays();
  }
  if (!input.gated || (replays_ && job->onDevice())) {
    // Nobody says when the state is written again. On the host a late write is found; on a device
    // it must not overtake the copy.
    job->policy = job->onDevice() ? PlacementPolicy::kSync
                  : control       ? job->policy
                                  : PlacementPolicy::kEager;
  }
  job->left_to_gate = control && job->onDevice();
  beside_copy_ = !control;
  sample(*job, input);
  faultPoint(FaultPoint::early_copy, input.step);
  if (job->onDevice()) {
    fetchAtPoint(*job);
  } else {
    for (uint64_t chunk = 0; chunk < plan.early_chunks; ++chunk) {
      copyChunk(*job, chunk, Tier::kAtOnce);
    }
    job->next_chunk.store(plan.early_chunks);
    job->chunks_left.store(plan.chunk_count - plan.early_chunks);
  }
  const bool all_copied = job->chunks_left.load() == 0;
  const bool host_waits = job->policy == PlacementPolicy::kSync && !job->onDevice();
  stats.captured.fetch_add(1);
  stats.object_bytes.store(input.objects.size());
  const uint64_t early_bytes =
      std::min(plan.early_chunks * plan.table.chunk_bytes, plan.table.payload_bytes);
  events_.push(
      {.what = OpEvent::kSnapshot,
       .group = static_cast<uint32_t>(job->policy),
       .tag = static_cast<uint32_t>(std::min<uint64_t>(plan.table.chunk_bytes, UINT32_MAX)),
       .ticket = static_cast<uint64_t>(input.step),
       .at_ns = clock_.nowNs(),
       .bytes = plan.table.payload_bytes,
       .signature =
           job->policy == PlacementPolicy::kSync ? plan.table.payload_bytes : early_bytes});
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
  }
  if (all_copied) {
    allCopied(*job);
  } else if (job->onDevice() ? job->placed : job->policy == PlacementPolicy::kGap) {
    attention_.store(true);
    events_.wake();
  } else {
    release(*job, /*at_gate=*/false);
  }
  if (host_waits) {
    work(*job);
  }
  if (host_waits || all_copied) {
    settle();
  }
  // With what the caller did for it: finding the small state takes longer than all else where the
  // model is small.
  const int64_t began = at_point_ ? point_begin_ns_ : start;
  const int64_t spent = clock_.nowNs() - began;
  const uint64_t span = vault_.spans().begin(SpanKind::kCapture, input.step, began);
  vault_.spans().extend(span, began + spent, input.objects.size());
  stats.capture_ns.fetch_add(static_cast<uint64_t>(spent));
  stats.capture_last_ns.store(static_cast<uint64_t>(spent));
  return CaptureResult::kTaken;
}

void SnapshotEngine::leaveOut(int64_t step) {
  settle();
  {
    const std::lock_guard lock(mutex_);
    newest_captured_ = std::max(newest_captured_, step);
  }
  expectReplays();
  skip(step, "the optimizer's step is captured into a graph");
}

// Under the mutex: waits until `ready`, which an outcome may bring about. Without an agent there is
// no outcome: one wait is enough, training must not pay for each step.
bool SnapshotEngine::awaitOutcome(std::unique_lock<std::mutex>& lock,
                                  const std::function<bool()>& ready) {
  const int64_t start = clock_.nowNs();
  if (!starved_ && !ready() && waited_in_vain_ns_ <= (start - started_ns_) / kRunPerVainWait) {
    const bool came =
        changed_.wait_for(lock, options_.slot_wait, [&] { return ready() || stopping_; });
    waited_in_vain_ns_ += came ? 0 : clock_.nowNs() - start;
  }
  return ready();
}

bool SnapshotEngine::beginPoint(int64_t step, std::span<const DeviceStream> streams) {
  const int64_t now = clock_.nowNs();
  at_point_ = true;
  pointOnDevice(step, streams);
  RankStats& stats = vault_.stats();
  if (point_begin_ns_ == 0) {  // a resumed job does not begin at 1
    const std::lock_guard lock(mutex_);
    protected_step_ = step - 1;
  }
  stats.steps.store(static_cast<uint64_t>(step));
  stats.step_ns.store(point_begin_ns_ == 0 ? 0 : static_cast<uint64_t>(now - point_begin_ns_));
  stats.step_end_ns.store(static_cast<uint64_t>(now));
  if (point_begin_ns_ != 0) {
    if (on_device_) {
      measureDevice();  // the host runs ahead of its device: its time between two points is not the
                        // step's
    } else {
      // What was done at the point is a cost of the snapshot, unless this step is there to show
      // what there would be without.
      meter_.step(block_, now - (beside_copy_ ? point_begin_ns_ : point_end_ns_), beside_copy_);
    }
  } else {
    control_steps_.beginAt(step + kWarmUpSteps);
  }
  point_begin_ns_ = point_end_ns_ = now;
  beside_copy_ = false;
  const bool taken = decideOn(step);
  block_ = control_steps_.block(step);
  control_ = taken && measured_every_ == 1 && control_steps_.drawn(step);
  if (meter_.blocks() != blocks_told_) {
    blocks_told_ = meter_.blocks();
    const std::lock_guard lock(mutex_);
    cadence_.learn(meter_.overhead());
    tellOverhead();
  }
  return taken;
}

void SnapshotEngine::endPoint() {
  point_end_ns_ = clock_.nowNs();
  control_ = at_point_ = false;
  // An optimizer that does not step in each iteration has a model that may write in each.
  std::erase_if(stepped_, [](const DeviceStream& one) { return !one.lasting; });
  if (device_placement_ != nullptr) {
    device_placement_->pointDone(block_, beside_copy_, point_begin_ns_, point_end_ns_);
    attention_.store(true);  // also where there is no snapshot: marks are to be given back
    events_.wake();
  }
}

bool SnapshotEngine::decideOn(int64_t step) {
  bool decides = false;
  {
    const std::lock_guard lock(mutex_);
    decides = cadence_.decidesAt(step);
  }
  if (decides) {
    settle();  // the vote on the snapshot before has to be cast to have an outcome
  }
  std::unique_lock lock(mutex_);
  const bool known = !decides || awaitOutcome(lock, [this] { return book_.undecided() == 0; });
  const Cadence::Answer answer = cadence_.ask(step, known);
  if (cadence_.every() != measured_every_) {
    measured_every_ = cadence_.every();
    control_steps_.beginAt(cadence_.since());
    meter_.restart(control_steps_.block(step));
    tellOverhead();
  }
  if (answer != Cadence::Answer::kVoteAgainst) {
    return answer == Cadence::Answer::kTake;
  }
  starved_ = true;
  lock.unlock();
  skip(step,
       "the outcome of the snapshot before is not known, so neither is how often snapshots are to "
       "be taken");
  return false;
}

// From here on state on devices may be written without a gate: nothing of it is measured any more.
void SnapshotEngine::expectReplays() {
  if (!replays_ && on_device_) {
    meter_.forget();
  }
  replays_ = true;
}

void SnapshotEngine::tellOverhead() {
  RankStats& stats = vault_.stats();
  const Overhead& overhead = meter_.overhead();
  const auto every = static_cast<int64_t>(cadence_.every());
  stats.every.store(static_cast<uint64_t>(every));
  // All bits set says "not known": the smallest slowdown below nothing is told as nothing.
  const int64_t ppm = overhead.ppm / every;
  stats.overhead_ppm.store(overhead.known ? static_cast<uint64_t>(ppm == -1 ? 0 : ppm)
                                          : ~uint64_t{0});
  stats.overhead_noise_ppm.store(overhead.known ? static_cast<uint64_t>(overhead.noise_ppm / every)
                                                : ~uint64_t{0});
}

void SnapshotEngine::release(Job& job, bool at_gate) {
  if (at_gate) {
    job.at_gate.store(true);
  }
  job.released.store(true);
  attention_.store(true);
  events_.wake();
  if (threads_.size() > 1) {
    // Under the mutex, so that a helper cannot miss it between its look and its sleep.
    { const std::lock_guard lock(mutex_); }
    help_wanted_.notify_all();
  }
}

// Returns its bytes.
uint64_t SnapshotEngine::copyChunk(Job& job, uint64_t chunk, Tier tier) {
  thread_local ChunkHasher hasher;
  const SnapshotTable& table = job.plan->table;
  const int64_t start = clock_.nowNs();
  hasher.reset();
  std::byte* payload = vault_.payload(static_cast<uint32_t>(job.slot));
  uint64_t at = chunk * table.chunk_bytes;
  const uint64_t end = std::min(at + table.chunk_bytes, table.payload_bytes);
  const uint64_t begin = at;
  for (uint32_t i = job.plan->first_piece[chunk];
       i < table.pieces.size() && table.pieces[i].payload_offset < end; ++i) {
    const Piece& piece = table.pieces[i];
    if (at < piece.payload_offset) {
      hasher.zero(payload + at, piece.payload_offset - at);
      at = piece.payload_offset;
    }
    const uint64_t into = at - piece.payload_offset;
    const uint64_t bytes = std::min(end - at, piece.end - piece.begin - into);
    hasher.copy(payload + at, job.addresses[piece.region] + piece.begin + into, bytes);
    at += bytes;
    if (i == job.plan->first_piece[chunk]) {
      faultPoint(FaultPoint::mid_chunk, job.step);
    }
    if (!table.regions[piece.region].early && job.versions != nullptr &&
        job.versions->version(piece.region) != job.versions_at_capture[piece.region]) {
      const std::lock_guard lock(job.late_mutex);
      job.late.push_back(piece.region);
    }
  }
  if (at < end) {
    hasher.zero(payload + at, end - at);
  }
  vault_.chunkHashes(static_cast<uint32_t>(job.slot))[chunk] = hasher.digest();
  const int64_t now = clock_.nowNs();
  job.copy_ns.fetch_add(now - start);
  countCopy(job.step, tier, start, now, end - begin);
  return end - begin;
}

void SnapshotEngine::countCopy(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns,
                               uint64_t bytes) {
  extendCopySpan(step, tier, begin_ns, end_ns, bytes);
  vault_.stats().bytes_copied.fetch_add(bytes, std::memory_order_relaxed);
  countTier(tier, bytes);
}

void SnapshotEngine::countTier(Tier tier, uint64_t bytes) {
  RankStats& stats = vault_.stats();
  std::atomic<uint64_t>* const by_tier[kTiers] = {
      &stats.at_once_copied_bytes, &stats.gap_copied_bytes, &stats.compute_copied_bytes,
      &stats.communication_copied_bytes, &stats.gate_copied_bytes};
  by_tier[static_cast<size_t>(tier)]->fetch_add(bytes, std::memory_order_relaxed);
}

void SnapshotEngine::extendCopySpan(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns,
                                    uint64_t bytes) {
  thread_local struct {
    const SpanLog* log = nullptr;
    uint64_t span = 0;
    int64_t step = 0;
    Tier tier{};
    int64_t end_ns = 0;
  } newest;
  SpanLog& log = vault_.spans();
  if (newest.log != &log || newest.step != step || newest.tier != tier ||
      begin_ns - newest.end_ns > kSameSpanNs) {
    newest = {&log, log.begin(SpanKind::kCopy, step, begin_ns, static_cast<uint8_t>(tier)), step,
              tier, end_ns};
  }
  newest.end_ns = end_ns;
  log.extend(newest.span, end_ns, bytes);
}

template <typename Copied>
bool SnapshotEngine::copyNext(Job& job, Tier tier, Copied copied) {
  if (job.onDevice()) {
    const auto fetched = fetchNext(job, tier);
    if (const uint64_t bytes = fetched ? land(job, *fetched) : 0; bytes != 0) {
      copied(bytes, fetched->tier);
    }
    return fetched.has_value();
  }
  const uint64_t chunk = job.next_chunk.fetch_add(1);
  if (chunk >= job.plan->chunk_count) {
    return false;
  }
  if (!job.failed.load(std::memory_order_relaxed)) {
    if (job.policy == PlacementPolicy::kSync) {
      tier = Tier::kAtOnce;
    } else if (job.at_gate.load(std::memory_order_relaxed)) {
      tier = Tier::kGate;
    }
    copied(copyChunk(job, chunk, tier), tier);
  }
  chunkDone(job);
  return true;
}

void SnapshotEngine::chunkDone(Job& job) {
  if (job.chunks_left.fetch_sub(1) == 1) {
    allCopied(job);
  }
}

// A version counter moves when an op has ended. One that was under way while its tensor was copied
// shows only once the training thread is between two ops: when it is in capture() or gate(), or
// calls check().
void SnapshotEngine::allCopied(Job& job) {
  bool checked = false;
  {
    const std::lock_guard lock(mutex_);
    job.copied = true;
    const bool between_ops = job.at_gate.load() || job.policy == PlacementPolicy::kSync;
    const bool nothing_late = job.plan->chunk_count == job.plan->early_chunks;
    if (between_ops || nothing_late || options_.ask_check == nullptr || job.failed.load() ||
        job.compared) {
      compareVersions(job);
    }
    checked = job.checked;
  }
  changed_.notify_all();  // the gate may have begun meanwhile
  if (checked) {
    attention_.store(true);
    events_.wake();
  } else if (job.checkable) {
    options_.ask_check();
  }
}

// Under the mutex. Lets the tensors go: whoever drops the last reference to one needs the GIL, so
// it must not be a copy thread.
void SnapshotEngine::compareVersions(Job& job) {
  const auto& regions = job.plan->table.regions;
  for (uint32_t i = 0; job.versions != nullptr && i < regions.size(); ++i) {
    if (!regions[i].early && job.versions->version(i) != job.versions_at_capture[i]) {
      job.late.push_back(i);
    }
  }
  job.versions.reset();
  job.compared = true;
  job.checked = job.copied;
}

void SnapshotEngine::check() {
  {
    const std::lock_guard lock(mutex_);
    if (job_ == nullptr || !job_->copied || job_->checked) {
      return;
    }
    compareVersions(*job_);
  }
  attention_.store(true);
  events_.wake();
}

// Everything that is left, at once: the training thread at the gate, and helpers.
void SnapshotEngine::work(Job& job) {
  while (copyNext(job, tier_now_.load(std::memory_order_relaxed), [](uint64_t, Tier) {})) {
  }
}

// What the first copy thread does with a snapshot: chunk by chunk, when the placement says so.
void SnapshotEngine::place(Job& job) {
  bool more = true;
  while (more && job.hasWork()) {
    placement_->hear();
    const int64_t begin = clock_.nowNs();
    const Grant grant = placement_->ask(job.step, begin);
    const auto let_go = [&] {
      return job.released.load() || job.failed.load() || stopping_.load();
    };
    if (grant.bytes == 0 && !let_go()) {
      events_.sleep(placement_->awaited(), grant.retry_ns, clock_, let_go);
      continue;
    }
    tier_now_.store(grant.tier, std::memory_order_relaxed);
    more = copyNext(job, grant.tier, [&](uint64_t bytes, Tier tier) {
      const int64_t end = clock_.nowNs();
      placement_->hear();  // whether the gap ended meanwhile
      placement_->copied(bytes, tier, begin, end);
    });
  }
  if (!job.onDevice()) {  // the waits of a host that is ahead of its device say nothing about gaps
    tellForecast(placement_->placer().model().errors());
  }
  vault_.stats().op_events_lost.store(events_.lost());
}

void SnapshotEngine::tellForecast(const ScheduleModel::Errors& errors) {
  RankStats& stats = vault_.stats();
  stats.forecast_error_ppm.store(static_cast<uint64_t>(errors.recent_median * 1e6));
  stats.forecast_last_ppm.store(static_cast<uint64_t>(errors.last_weighted * 1e6));
  stats.foretold_gap_ns.store(static_cast<uint64_t>(errors.foretold_ns));
  stats.unforetold_gap_ns.store(static_cast<uint64_t>(errors.unforetold_ns));
  stats.forecast_steps.store(errors.steps);
}

void SnapshotEngine::finish(Job& job) {
  const uint64_t span = vault_.spans().begin(SpanKind::kSeal, job.step, clock_.nowNs());
  const SnapshotTable& table = job.plan->table;
  RankStats& stats = vault_.stats();
  const auto slot = static_cast<uint32_t>(job.slot);
  const auto seed = static_cast<uint64_t>(job.step) * 0x9E3779B97F4A7C15ull;
  bool good = !job.failed.load();
  if (good && job.late.empty()) {
    for (size_t i = 0; i < table.pieces.size(); ++i) {
      const Piece& piece = table.pieces[i];
      if (job.sampled(piece.region) &&
          sampleHash(vault_.payload(slot) + piece.payload_offset, piece.end - piece.begin,
                     options_.verify_full ? 0 : job.plan->samples[i],
                     seed + i) != job.sample_hashes[i]) {
        job.late.push_back(piece.region);
      }
    }
  }
  good = good && job.late.empty();
  if (good) {
    faultPoint(FaultPoint::before_seal, job.step);
    vault_.sealSlot(slot, job.group_digests, clock_.nowNs());
    stats.sealed.fetch_add(1);
    stats.sealed_step.store(static_cast<uint64_t>(job.step));
    faultPoint(FaultPoint::after_seal, job.step);
  } else {
    vault_.clearSlot(slot);
    stats.dropped.fetch_add(1);
    if (!job.late.empty()) {
      note("step " + std::to_string(job.step) +
           " dropped: " + table.regions[job.late.front()].name +
           " was written between the optimizer step and its copy; it is copied before the step "
           "returns from now on");
    }
  }
  stats.copy_ns.fetch_add(static_cast<uint64_t>(job.copy_ns.load()));
  vault_.spans().extend(span, clock_.nowNs(), good ? 1 : 0);
  {
    const std::lock_guard lock(mutex_);
    if (good) {
      book_.sealed(job.slot);
    } else {
      book_.dropped(job.slot);
    }
    late_.insert(late_.end(), job.late.begin(), job.late.end());
  }
  vote(job.step, job.cut, good, job.wish);
  {
    const std::lock_guard lock(mutex_);
    job.finished = true;
    if (job_.get() == &job) {
      job_.reset();
    }
  }
  changed_.notify_all();
}

int64_t SnapshotEngine::gate(std::span<const DeviceStream> streams) {
  const int64_t start = clock_.nowNs();
  for (const DeviceStream& one : streams) {
    if (std::find(stepped_.begin(), stepped_.end(), one) == stepped_.end()) {
      stepped_.push_back(one);
    }
  }
  const auto job = finishCopy(streams);
  markGate(streams, [] {});  // of a snapshot that was finished before
  const int64_t waited = job == nullptr ? 0 : clock_.nowNs() - start;
  if (waited != 0) {
    vault_.stats().gate_ns.fetch_add(static_cast<uint64_t>(waited));
    vault_.stats().gate_last_ns.store(static_cast<uint64_t>(waited));
    if (waited > kToldGateNs) {
      const uint64_t span = vault_.spans().begin(SpanKind::kGate, job->step, start);
      vault_.spans().extend(span, start + waited, 0);
    }
  }
  events_.push({.what = OpEvent::kGate,
                .at_ns = waited == 0 ? start : clock_.nowNs(),
                .signature = static_cast<uint64_t>(start)});
  return waited;
}

// By the training thread: until nothing of the live memory is needed any more. nullptr: nothing was
// under way.
std::shared_ptr<SnapshotEngine::Job> SnapshotEngine::finishCopy(
    std::span<const DeviceStream> streams) {
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = job_;
    if (job == nullptr || job->checked) {
      return job;
    }
  }
  faultPoint(FaultPoint::gate, job->step);
  if (job->onDevice()) {
    holdTraining(*job, streams.empty() ? job->streams : streams);
    return job;
  }
  release(*job, /*at_gate=*/true);
  work(*job);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return job->copied; });
  if (!job->checked) {
    compareVersions(*job);
    attention_.store(true);
    events_.wake();
  }
  return job;
}

bool SnapshotEngine::settle() {
  return settleWithin(options_.device_wait);
}

bool SnapshotEngine::settleWithin(std::chrono::nanoseconds most) {
  const auto job = finishCopy({});
  if (job == nullptr) {
    return true;
  }
  {
    std::unique_lock lock(mutex_);
    if (job->onDevice()) {  // a device that hangs must not make this thread hang, and not for
                            // longer than once
      const auto wait =
          job->given_up ? std::chrono::nanoseconds(0) : std::min(most, options_.device_wait);
      const bool finished = changed_.wait_for(lock, wait, [&] { return job->finished; });
      job->given_up = !finished && (job->given_up || wait == options_.device_wait);
      return finished;
    }
    if (job->claimed) {
      changed_.wait(lock, [&] { return job->finished; });
      return true;
    }
    job->claimed = true;
  }
  finish(*job);
  return true;
}

void SnapshotEngine::outcome(const wire::Ballot& ballot) {
  {
    const std::lock_guard lock(mutex_);
    book_.outcome(ballot.step, ballot.incarnation, ballot.yes != 0);
    starved_ = false;
    if (ballot.incarnation != options_.incarnation) {
      return;
    }
    newest_settled_ = std::max(newest_settled_, ballot.step);
    if (ballot.yes != 0) {
      cadence_.committed(ballot.step, ballot.wish);
    }
    if (ballot.yes == 0 && ballot.cut != 0) {
      note("step " + std::to_string(ballot.step) +
           " not committed: the ranks were at different points of the program when"
           " their optimizers returned (a message was under way, or they do not count the same "
           "steps)");
    }
    if (ballot.yes != 0 && ballot.step > committed_step_.load()) {
      committed_step_.store(ballot.step);
      vault_.stats().committed_step.store(static_cast<uint64_t>(ballot.step));
      protected_step_ = ballot.step;
      protected_ns_ = clock_.nowNs();
      vault_.stats().commit_ns.store(static_cast<uint64_t>(protected_ns_));
    }
  }
  changed_.notify_all();
  if (ballot.yes != 0) {
    faultPoint(FaultPoint::after_commit, ballot.step);
  }
}

std::vector<uint32_t> SnapshotEngine::takeLateWritten() {
  settle();  // at the program point, so it is a part of what a capture costs
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> result = std::move(late_);
  late_.clear();
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

bool SnapshotEngine::drain(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  settleWithin(timeout);
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, end, [&] { return newest_settled_ >= newest_captured_; });
}

void SnapshotEngine::checkAlarm() {
  bool tell = false;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t ops = options_.ops_begun();
    const int64_t now = clock_.nowNs();
    const RankStats& stats = vault_.stats();
    const auto points = static_cast<int64_t>(stats.steps.load()) - protected_step_;
    const auto every = static_cast<int64_t>(cadence_.every());
    // The outcome of the last one may not be known before the next point.
    const bool as_rare_as_asked =
        every > 1 && points <= every + 1 &&
        now - static_cast<int64_t>(stats.step_end_ns.load()) <= options_.alarm.count();
    const bool stale = now - protected_ns_ > options_.alarm.count() && !as_rare_as_asked;
    // Idle jobs lose nothing: only collectives that progress without a commit are worth an alarm.
    const bool unprotected = stale && (unprotected_ || ops != ops_at_alarm_check_);
    tell = unprotected != unprotected_;
    unprotected_ = unprotected;
    ops_at_alarm_check_ = ops;
    vault_.stats().unprotected.store(unprotected ? 1 : 0);
  }
  if (tell && options_.on_alarm) {
    options_.on_alarm(unprotected_);
  }
}

void SnapshotEngine::help() {
  beginCopyThread();
  NodeAffinity affinity;
  while (true) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      help_wanted_.wait(lock, [&] {
        return stopping_ || (job_ != nullptr && job_->released.load() && job_->hasWork());
      });
      if (stopping_) {
        return;
      }
      job = job_;
    }
    affinity.follow(job->node);
    work(*job);
  }
}

// The first copy thread: places, keeps the model up to date in between, and looks at the alarm.
void SnapshotEngine::decide() {
  beginCopyThread();
  NodeAffinity affinity;
  const bool watches = options_.alarm.count() > 0 && options_.ops_begun != nullptr;
  while (true) {
    std::shared_ptr<Job> job;
    bool checked = false;
    attention_.store(false);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) {
        return;
      }
      checked = job_ != nullptr && job_->checked && !job_->claimed;
      if (checked) {
        job_->claimed = true;
      }
      job = checked || (job_ != nullptr && job_->hasWork()) ? job_ : nullptr;
    }
    if (checked) {
      finish(*job);
      learnOfDevice();  // where the host is far ahead of the device, there was no time for it
                        // before
    } else if (job != nullptr) {
      affinity.follow(job->node);
      job->placed ? placeOnDevice(*job) : place(*job);
    } else {
      placement_->hear();
      learnOfDevice();
      const auto period =
          std::max<std::chrono::nanoseconds>(options_.alarm / 4, std::chrono::seconds(1));
      int64_t until_ns = watches ? clock_.nowNs() + period.count() : Grant::kNever;
      if (options_.device_marks != nullptr && options_.device_marks->following()) {
        until_ns =
            std::min(until_ns, clock_.nowNs() + kDeviceLookNs);  // marks are to be given back
      }
      events_.sleep(0, until_ns, clock_, [&] { return attention_.load() || stopping_.load(); });
    }
    if (watches) {
      checkAlarm();
    }
  }
}

}  // namespace reft
