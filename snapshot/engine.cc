#include "snapshot/engine.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "intercept/base/error.h"
#include "intercept/base/fault.h"
#include "snapshot/copy.h"

namespace reft {

namespace {

constexpr uint32_t kVerifySamples = 8192;  // cache lines per snapshot; about half a millisecond
constexpr uint32_t kMinPieceSamples = 4;
constexpr uint32_t kDigestSamples = 256;  // cache lines per sharding group
constexpr int kCopyNice = 10;
constexpr int64_t kRunPerVainWait = 100;  // waits in vain take a hundredth of the run

}  // namespace

// A table with what is derived from it once.
struct SnapshotEngine::Plan {
  SnapshotTable table;
  std::string json;
  uint64_t json_hash = 0;
  uint64_t chunk_count = 0;
  uint64_t early_chunks = 0;
  std::vector<uint32_t> first_piece;  // per chunk: the first piece that reaches into it
  std::vector<uint32_t> samples;      // per piece
  std::vector<std::vector<uint32_t>> group_regions;

  explicit Plan(SnapshotTable t) : table(std::move(t)), json(table.toJson()) {
    json_hash = hashBytes(json.data(), json.size());
    chunk_count = (table.payload_bytes + table.chunk_bytes - 1) / table.chunk_bytes;
    early_chunks = table.early_bytes / table.chunk_bytes;
    uint32_t piece = 0;
    for (uint64_t chunk = 0; chunk < chunk_count; ++chunk) {
      const uint64_t begin = chunk * table.chunk_bytes;
      while (piece < table.pieces.size() &&
             table.pieces[piece].payload_offset + (table.pieces[piece].end - table.pieces[piece].begin) <= begin) {
        ++piece;
      }
      first_piece.push_back(piece);
    }
    for (const Piece& p : table.pieces) {
      const uint64_t bytes = p.end - p.begin;
      samples.push_back(static_cast<uint32_t>(
          std::max<uint64_t>(kMinPieceSamples, kVerifySamples * bytes / std::max<uint64_t>(table.payload_bytes, 1))));
    }
    group_regions.resize(table.groups.size());
    for (uint32_t r = 0; r < table.regions.size(); ++r) {
      if (table.regions[r].group >= 0) {
        group_regions[static_cast<size_t>(table.regions[r].group)].push_back(r);
      }
    }
  }
};

struct SnapshotEngine::Job {
  std::shared_ptr<const Plan> plan;
  int64_t step = 0;
  int slot = -1;
  std::vector<const std::byte*> addresses;
  std::vector<uint64_t> versions_at_capture;
  std::shared_ptr<const VersionReader> versions;
  std::vector<uint64_t> sample_hashes;  // per piece
  std::vector<uint64_t> group_digests;
  uint64_t cut = 0;
  std::atomic<uint64_t> next_chunk{0};
  std::atomic<uint64_t> chunks_left{0};
  std::atomic<bool> failed{false};
  std::atomic<int64_t> copy_ns{0};
  std::mutex late_mutex;
  std::vector<uint32_t> late;
  bool finished = false;  // guarded by the engine's mutex
};

SnapshotEngine::SnapshotEngine(EngineOptions options, Vault& vault, VoteSink vote, const Clock& clock)
    : options_(std::move(options)),
      vault_(vault),
      vote_(std::move(vote)),
      clock_(clock),
      book_(static_cast<int>(vault.slots())) {
  vault_.stats().incarnation.store(options_.incarnation);
  vault_.stats().committed_step.store(static_cast<uint64_t>(-1));
  vault_.stats().sealed_step.store(static_cast<uint64_t>(-1));
  protected_ns_ = started_ns_ = clock_.nowNs();
  for (uint32_t i = 0; i < std::max(options_.copy_threads, 1u); ++i) {
    threads_.emplace_back([this, i] { run(i == 0); });
  }
}

SnapshotEngine::~SnapshotEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (job_ != nullptr) {
      job_->failed.store(true);
    }
  }
  work_arrived_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void SnapshotEngine::note(const std::string& text) {
  RankStats& stats = vault_.stats();
  std::snprintf(stats.note, sizeof(stats.note), "%s", text.c_str());
}

void SnapshotEngine::vote(int64_t step, uint64_t cut, bool sealed) {
  wire::Ballot ballot{};
  ballot.step = step;
  ballot.incarnation = options_.incarnation;
  ballot.cut = cut;
  ballot.yes = sealed ? 1 : 0;
  vote_(ballot);
  faultPoint(FaultPoint::after_vote, step);
}

void SnapshotEngine::adopt(uint32_t slot, int64_t step, uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  book_.adopt(static_cast<int>(slot), step, incarnation);
}

void SnapshotEngine::setTable(SnapshotTable table) {
  gate();
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
      // A slot that holds a snapshot (sealed, or adopted at restore) is grown when the book gives it out.
      const auto raw = VaultReader(vault_.fd()).slots();
      for (const SlotView& view : raw) {
        needed |= view.index == i && book_.find(view.step, view.incarnation) == static_cast<int>(i);
      }
    }
    if (!needed) {
      vault_.reserveSlot(i, plan->json.size() * 2, options_.object_bytes, plan->chunk_count, plan->table.payload_bytes);
    }
    slot_bytes +=
        kPage + plan->json.size() * 2 + options_.object_bytes + plan->chunk_count * 8 + plan->table.payload_bytes;
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
    // The whole slot moves, so small state that grows a little every step must not do this every step.
    object_bytes = std::max<size_t>(options_.object_bytes, object_bytes * 2);
  }
  try {
    vault_.reserveSlot(static_cast<uint32_t>(slot), plan.json.size(), object_bytes, plan.chunk_count,
                       plan.table.payload_bytes);
    return true;
  } catch (const Error& error) {
    note(error.what());
    vault_.stats().errors.fetch_add(1);
    return false;
  }
}

CaptureResult SnapshotEngine::capture(const CaptureInput& input) {
  const int64_t start = clock_.nowNs();
  gate();  // a loop whose gate never ran (optimizers outside torch.optim) still never mixes two steps
  RankStats& stats = vault_.stats();
  faultPoint(FaultPoint::capture, input.step);
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
    // Without an agent there is no outcome: one wait is enough, training must not pay for each step.
    if (!starved_ && !book_.canAcquire() && waited_in_vain_ns_ <= (start - started_ns_) / kRunPerVainWait) {
      const bool freed = changed_.wait_for(lock, options_.slot_wait, [&] { return book_.canAcquire() || stopping_; });
      waited_in_vain_ns_ += freed ? 0 : clock_.nowNs() - start;
    }
    starved_ = !book_.canAcquire();
    slot = book_.acquire(input.step, options_.incarnation);
    newest_captured_ = input.step;
  }
  const Plan& plan = *job->plan;
  if (!slot) {
    stats.skipped.fetch_add(1);
    note("step " + std::to_string(input.step) +
         " skipped: no slot became free (the job has not committed the one before)");
    vote(input.step, 0, false);
    return CaptureResult::kNoSlot;
  }
  job->slot = *slot;
  job->step = input.step;
  if (!prepareSlot(*slot, plan, input.objects.size())) {
    {
      const std::lock_guard lock(mutex_);
      book_.dropped(*slot);
    }
    stats.dropped.fetch_add(1);
    vote(input.step, 0, false);
    return CaptureResult::kFailed;
  }
  vault_.beginSlot(static_cast<uint32_t>(*slot), input.step, options_.incarnation, plan.json, plan.json_hash,
                   plan.table.chunk_bytes, plan.table.payload_bytes, plan.chunk_count);
  vault_.putObjects(static_cast<uint32_t>(*slot), input.objects);
  vault_.setCut(static_cast<uint32_t>(*slot), input.cut);
  job->cut = input.cut;
  job->addresses.reserve(input.addresses.size());
  for (const void* address : input.addresses) {
    job->addresses.push_back(static_cast<const std::byte*>(address));
  }
  job->versions = input.versions;
  if (job->versions != nullptr) {
    job->versions_at_capture.reserve(input.addresses.size());
    for (size_t i = 0; i < input.addresses.size(); ++i) {
      job->versions_at_capture.push_back(job->versions->version(i));
    }
  }
  const auto seed = static_cast<uint64_t>(input.step) * 0x9E3779B97F4A7C15ull;
  job->sample_hashes.reserve(plan.table.pieces.size());
  for (size_t i = 0; i < plan.table.pieces.size(); ++i) {
    const Piece& piece = plan.table.pieces[i];
    const bool early = plan.table.regions[piece.region].early;
    job->sample_hashes.push_back(early ? 0
                                       : sampleHash(job->addresses[piece.region] + piece.begin, piece.end - piece.begin,
                                                    options_.verify_full ? 0 : plan.samples[i], seed + i));
  }
  for (const auto& regions : plan.group_regions) {
    uint64_t bytes = 0;
    for (const uint32_t r : regions) {
      bytes += plan.table.regions[r].bytes;
    }
    uint64_t digest = seed;
    uint64_t position = 0;  // in the group, not in the table: members have different private regions in between
    for (const uint32_t r : regions) {
      const uint64_t size = plan.table.regions[r].bytes;
      const auto samples =
          static_cast<uint32_t>(std::max<uint64_t>(1, kDigestSamples * size / std::max<uint64_t>(bytes, 1)));
      digest = digest * 31 + sampleHash(job->addresses[r], size, samples, seed + position++);
    }
    job->group_digests.push_back(digest);
  }
  faultPoint(FaultPoint::early_copy, input.step);
  for (uint64_t chunk = 0; chunk < plan.early_chunks; ++chunk) {
    copyChunk(*job, chunk);
  }
  job->next_chunk.store(plan.early_chunks);
  job->chunks_left.store(plan.chunk_count - plan.early_chunks);
  stats.captured.fetch_add(1);
  stats.object_bytes.store(input.objects.size());
  const int64_t spent = clock_.nowNs() - start;
  stats.capture_ns.fetch_add(static_cast<uint64_t>(spent));
  stats.capture_last_ns.store(static_cast<uint64_t>(spent));
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
  }
  if (plan.chunk_count == plan.early_chunks) {
    finish(*job);
  } else {
    work_arrived_.notify_all();
  }
  return CaptureResult::kTaken;
}

void SnapshotEngine::copyChunk(Job& job, uint64_t chunk) {
  thread_local ChunkHasher hasher;
  const SnapshotTable& table = job.plan->table;
  const int64_t start = clock_.nowNs();
  hasher.reset();
  std::byte* payload = vault_.payload(static_cast<uint32_t>(job.slot));
  uint64_t at = chunk * table.chunk_bytes;
  const uint64_t end = std::min(at + table.chunk_bytes, table.payload_bytes);
  const uint64_t begin = at;
  for (uint32_t i = job.plan->first_piece[chunk]; i < table.pieces.size() && table.pieces[i].payload_offset < end;
       ++i) {
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
  job.copy_ns.fetch_add(clock_.nowNs() - start);
  vault_.stats().bytes_copied.fetch_add(end - begin, std::memory_order_relaxed);
}

void SnapshotEngine::work(Job& job, bool training_thread) {
  while (true) {
    const uint64_t chunk = job.next_chunk.fetch_add(1);
    if (chunk >= job.plan->chunk_count) {
      return;
    }
    if (!job.failed.load(std::memory_order_relaxed)) {
      copyChunk(job, chunk);
      if (training_thread) {
        vault_.stats().gate_copied_bytes.fetch_add(job.plan->table.chunk_bytes, std::memory_order_relaxed);
      }
    }
    if (job.chunks_left.fetch_sub(1) == 1) {
      finish(job);
    }
  }
}

void SnapshotEngine::finish(Job& job) {
  const SnapshotTable& table = job.plan->table;
  RankStats& stats = vault_.stats();
  const auto slot = static_cast<uint32_t>(job.slot);
  const auto seed = static_cast<uint64_t>(job.step) * 0x9E3779B97F4A7C15ull;
  bool good = !job.failed.load();
  if (good && job.late.empty()) {
    for (size_t i = 0; i < table.pieces.size(); ++i) {
      const Piece& piece = table.pieces[i];
      if (!table.regions[piece.region].early &&
          sampleHash(vault_.payload(slot) + piece.payload_offset, piece.end - piece.begin,
                     options_.verify_full ? 0 : job.plan->samples[i], seed + i) != job.sample_hashes[i]) {
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
      note("step " + std::to_string(job.step) + " dropped: " + table.regions[job.late.front()].name +
           " was written between the optimizer step and its copy; it is copied before the step returns from now on");
    }
  }
  stats.copy_ns.fetch_add(static_cast<uint64_t>(job.copy_ns.load()));
  {
    const std::lock_guard lock(mutex_);
    if (good) {
      book_.sealed(job.slot);
    } else {
      book_.dropped(job.slot);
    }
    late_.insert(late_.end(), job.late.begin(), job.late.end());
  }
  vote(job.step, job.cut, good);
  {
    const std::lock_guard lock(mutex_);
    job.finished = true;
    if (job_.get() == &job) {
      job_.reset();
    }
  }
  changed_.notify_all();
}

int64_t SnapshotEngine::gate() {
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = job_;
  }
  if (job == nullptr) {
    return 0;
  }
  const int64_t start = clock_.nowNs();
  faultPoint(FaultPoint::gate, job->step);
  work(*job, true);
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return job->finished; });
  }
  const int64_t waited = clock_.nowNs() - start;
  vault_.stats().gate_ns.fetch_add(static_cast<uint64_t>(waited));
  vault_.stats().gate_last_ns.store(static_cast<uint64_t>(waited));
  return waited;
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
    if (ballot.yes == 0 && ballot.cut != 0) {
      note("step " + std::to_string(ballot.step) +
           " not committed: the ranks were at different points of the program when"
           " their optimizers returned (a message was under way, or they do not count the same steps)");
    }
    if (ballot.yes != 0 && ballot.step > committed_step_.load()) {
      committed_step_.store(ballot.step);
      vault_.stats().committed_step.store(static_cast<uint64_t>(ballot.step));
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
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> result = std::move(late_);
  late_.clear();
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

bool SnapshotEngine::drain(std::chrono::milliseconds timeout) {
  gate();
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return newest_settled_ >= newest_captured_; });
}

void SnapshotEngine::checkAlarm() {
  bool tell = false;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t ops = options_.ops_begun();
    const bool stale = clock_.nowNs() - protected_ns_ > options_.alarm.count();
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

void SnapshotEngine::run(bool watches) {
  ::pthread_setname_np(::pthread_self(), "reft-copy");
  // Copies yield to training; the gate helps with what is left, so a low priority cannot delay the next step for long.
  // Relative to training, which may itself run with another priority than 0.
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  ::setpriority(PRIO_PROCESS, thread, ::getpriority(PRIO_PROCESS, thread) + kCopyNice);
  while (true) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      const auto ready = [&] {
        return stopping_ || (job_ != nullptr && job_->next_chunk.load() < job_->plan->chunk_count);
      };
      if (watches && options_.alarm.count() > 0 && options_.ops_begun) {
        work_arrived_.wait_for(lock, std::max<std::chrono::nanoseconds>(options_.alarm / 4, std::chrono::seconds(1)),
                               ready);
      } else {
        work_arrived_.wait(lock, ready);
      }
      if (stopping_) {
        return;
      }
      job = ready() ? job_ : nullptr;
    }
    if (job != nullptr) {
      work(*job, false);
    }
    if (watches && options_.alarm.count() > 0 && options_.ops_begun) {
      checkAlarm();
    }
  }
}

}  // namespace reft
