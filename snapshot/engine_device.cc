// What is different in a snapshot with regions on devices: a chunk is fetched (its copies are asked for, what lies on the host is
// copied) and landed (its copies are awaited and its bytes hashed) apart, and the gate holds back the device instead of the host.
//
// Everything that was fetched before the gate asked is in the copy streams, because a chunk is taken and fetched under one lock; so
// the streams that train, which the gate makes wait for the copy streams, cannot overtake a copy.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "intercept/base/error.h"
#include "intercept/base/fault.h"
#include "snapshot/copy.h"
#include "snapshot/engine.h"
#include "snapshot/engine_job.h"
#include "snapshot/placement.h"

namespace reft {

namespace {

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(1000);
constexpr size_t kFetchedAhead = 8;          // chunks
constexpr int64_t kProbeNs = 1'000'000'000;  // of waiting, until the device is asked whether it has failed

}  // namespace

// Why no snapshot can be begun; empty: it has, and copies wait for this point of the streams.
std::string SnapshotEngine::beginOnDevices(std::span<const DeviceStream> streams) {
  if (device_copy_ == nullptr) {
    device_copy_ = std::make_unique<DeviceCopy>(options_.cuda == nullptr ? cudaApi() : *options_.cuda);
    vault_.beforeMove([this](std::byte* payload) { device_copy_->unpin(payload); });
  }
  if (device_copy_->capturing(streams)) {
    return "the optimizer's step is captured into a graph";
  }
  if (!device_copy_->begin(streams)) {
    return "snapshots of device memory have ended after an error: " + device_copy_->why();
  }
  return "";
}

bool SnapshotEngine::pinSlot(int slot) {
  const auto index = static_cast<uint32_t>(slot);
  if (device_copy_->pin(vault_.payload(index), vault_.payloadCapacity(index))) {
    return true;
  }
  note("snapshots of device memory have ended after an error: " + device_copy_->why());
  vault_.stats().errors.fetch_add(1);
  return false;
}

bool SnapshotEngine::busyOnDevice() {
  const std::lock_guard lock(mutex_);
  return job_ != nullptr && job_->onDevice();
}

// At the program point. Chunks that the next forward may write go first, and the device's next work waits for them.
void SnapshotEngine::fetchEarly(Job& job) {
  const std::lock_guard lock(job.fetch_mutex);
  job.chunks_left.store(job.plan->chunk_count);
  while (job.next_chunk.load() < job.plan->early_chunks && fetchOne(job, Tier::kAtOnce)) {
  }
  if (job.plan->early_chunks > 0 && !device_copy_->hold(job.streams)) {
    job.failed.store(true);
  }
}

// Under the job's fetch_mutex.
void SnapshotEngine::fetchChunk(Job& job, Fetched& fetched) {
  fetched.begin_ns = clock_.nowNs();
  if (job.failed.load(std::memory_order_relaxed)) {
    return;
  }
  const SnapshotTable& table = job.plan->table;
  std::byte* const payload = vault_.payload(static_cast<uint32_t>(job.slot));
  uint64_t at = fetched.chunk * table.chunk_bytes;
  const uint64_t end = std::min(at + table.chunk_bytes, table.payload_bytes);
  bool fine = true;
  for (uint32_t i = job.plan->first_piece[fetched.chunk];
       fine && i < table.pieces.size() && table.pieces[i].payload_offset < end; ++i) {
    const Piece& piece = table.pieces[i];
    if (at < piece.payload_offset) {
      std::memset(payload + at, 0, piece.payload_offset - at);
      at = piece.payload_offset;
    }
    const uint64_t into = at - piece.payload_offset;
    const uint64_t bytes = std::min(end - at, piece.end - piece.begin - into);
    const std::byte* const from = job.addresses[piece.region] + piece.begin + into;
    if (const int device = job.devices[piece.region]; device < 0) {
      std::memcpy(payload + at, from, bytes);
    } else {
      fine = device_copy_->copy(device, payload + at, from, bytes);
      if (std::none_of(fetched.tickets.begin(), fetched.tickets.end(),
                       [&](const auto& t) { return t.device == device; })) {
        fetched.tickets.push_back({device, 0});
      }
    }
    at += bytes;
  }
  if (fine && at < end) {
    std::memset(payload + at, 0, end - at);
  }
  for (DeviceCopy::Ticket& ticket : fetched.tickets) {
    fine = fine && device_copy_->submit(ticket.device, ticket);
  }
  if (!fine) {
    job.failed.store(true);
  }
}

// The next chunk that somebody has to look for: one that was fetched already, else the next one. nullopt: there is none. A few are
// fetched ahead, so that the copy stream has work while the one before is hashed.
std::optional<SnapshotEngine::Fetched> SnapshotEngine::fetchNext(Job& job, Tier tier) {
  const std::lock_guard lock(job.fetch_mutex);
  while (job.to_land.size() < kFetchedAhead &&
         fetchOne(job, job.policy == PlacementPolicy::kSync ? Tier::kAtOnce : tier)) {
  }
  if (job.to_land.empty()) {
    return std::nullopt;
  }
  return takeFetched(job);
}

// The oldest of those that were fetched. Under the job's fetch_mutex.
SnapshotEngine::Fetched SnapshotEngine::takeFetched(Job& job) {
  Fetched fetched = std::move(job.to_land.front());
  job.to_land.pop_front();
  job.unlanded.store(job.to_land.size());
  return fetched;
}

// Under the job's fetch_mutex. False: all chunks are fetched.
bool SnapshotEngine::fetchOne(Job& job, Tier tier) {
  if (job.next_chunk.load() >= job.plan->chunk_count) {
    return false;
  }
  Fetched fetched;
  fetched.chunk = job.next_chunk.fetch_add(1);
  fetched.tier = tier;
  fetchChunk(job, fetched);
  job.to_land.push_back(std::move(fetched));
  job.unlanded.store(job.to_land.size());
  return true;
}

// Whether the copies of a snapshot that begins are to be ordered behind the waits of its device.
bool SnapshotEngine::beginPlacing(const Job& job) {
  const bool one = job.streams.size() == 1 && options_.device_waits != nullptr;
  if (!one || job.policy != PlacementPolicy::kGap) {
    if (options_.device_waits != nullptr) {
      options_.device_waits->ignore();
    }
    return false;
  }
  if (device_placement_ == nullptr) {
    device_placement_ = std::make_unique<DevicePlacement>(*device_copy_, *options_.device_waits);
  }
  const SnapshotTable& table = job.plan->table;
  const uint64_t early = std::min(job.plan->early_chunks * table.chunk_bytes, table.payload_bytes);
  return device_placement_->begin(job.streams.front(), job.step, table.chunk_bytes, table.payload_bytes - early);
}

// Asks for the copies of what is ordered by now. Under the job's fetch_mutex.
void SnapshotEngine::fetchOrdered(Job& job) {
  while (job.placed && !job.failed.load()) {
    const auto order = device_placement_->next(job.step);
    if (!order) {
      return;
    }
    const int device = job.streams.front().device;
    if (order->behind && !device_copy_->after(device, device_placement_->event(*order->behind))) {
      job.failed.store(true);
      return;
    }
    uint64_t bytes = 0;
    while (bytes < order->bytes && fetchOne(job, order->tier)) {
      bytes += job.plan->table.chunk_bytes;
    }
    auto end = device_placement_->takeMark();
    if (end && !device_copy_->stamp(device, device_placement_->event(*end))) {
      job.failed.store(true);
    }
    device_placement_->ordered(*order, std::min(bytes, order->bytes), end);
  }
}

// What the first copy thread does with a snapshot whose device begins the copies by itself: asks for what is ordered, and looks for
// what has landed, without ever waiting for one when the other may be due.
void SnapshotEngine::placeOnDevice(Job& job) {
  const auto let_go = [&] { return job.released.load() || job.failed.load() || stopping_.load(); };
  auto pause = kFirstPause;
  while (job.hasWork()) {
    if (let_go()) {
      work(job);
      break;
    }
    {
      const std::lock_guard lock(job.fetch_mutex);
      fetchOrdered(job);
    }
    device_placement_->learn();
    if (landNext(job)) {
      pause = kFirstPause;
      continue;
    }
    const int64_t until_ns =
        job.unlanded.load() != 0 ? clock_.nowNs() + std::chrono::nanoseconds(pause).count() : Grant::kNever;
    events_.sleep(OpEvents::bit(OpEvent::kWaitBegin), until_ns, clock_, let_go);
    placement_->hear();
    pause = std::min(kLongestPause, pause * 2);
  }
  tellForecast(device_placement_->errors());
}

// Lands the oldest chunk that is under way, if it has arrived.
bool SnapshotEngine::landNext(Job& job) {
  Fetched fetched;
  {
    const std::lock_guard lock(job.fetch_mutex);
    if (job.to_land.empty() || !hasLanded(job.to_land.front())) {
      return false;
    }
    fetched = takeFetched(job);
  }
  land(job, fetched);
  return true;
}

// What makes the stream wait for copies is between kGate and kDone. After it nothing is marked: the next step may have no snapshot.
void SnapshotEngine::markGate(OpEvent::What what, std::span<const DeviceStream> streams) {
  if (options_.device_waits == nullptr || !options_.device_waits->watching()) {
    return;
  }
  if (streams.size() == 1) {
    device_copy_->mark(*options_.device_waits, {.what = what}, streams.front());
  }
  if (what == OpEvent::kDone) {
    options_.device_waits->ignore();
  }
}

bool SnapshotEngine::hasLanded(const Fetched& fetched) const {
  return std::all_of(fetched.tickets.begin(), fetched.tickets.end(),
                     [&](const DeviceCopy::Ticket& ticket) { return device_copy_->landed(ticket); });
}

// Also waits for what a snapshot that has failed has under way: its slot is given out again. False: there is no telling when it
// lands, and no other snapshot will be begun.
bool SnapshotEngine::awaitLanding(const Job& /*job*/, const Fetched& fetched) {
  auto pause = kFirstPause;
  int64_t probe_ns = clock_.nowNs() + kProbeNs;
  while (!hasLanded(fetched)) {
    if (stopping_.load() || !device_copy_->usable()) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(kLongestPause, pause * 2);
    if (clock_.nowNs() >= probe_ns) {
      for (const DeviceCopy::Ticket& ticket : fetched.tickets) {
        device_copy_->probe(ticket.device);
      }
      probe_ns = clock_.nowNs() + kProbeNs;
    }
  }
  return true;
}

// Returns its bytes.
uint64_t SnapshotEngine::land(Job& job, const Fetched& fetched) {
  const SnapshotTable& table = job.plan->table;
  const uint64_t begin = fetched.chunk * table.chunk_bytes;
  const uint64_t bytes = std::min(table.chunk_bytes, table.payload_bytes - begin);
  if (!awaitLanding(job, fetched)) {
    job.failed.store(true);
  }
  if (!job.failed.load()) {
    thread_local ChunkHasher hasher;
    hasher.reset();
    const auto slot = static_cast<uint32_t>(job.slot);
    hasher.hash(vault_.payload(slot) + begin, bytes);
    vault_.chunkHashes(slot)[fetched.chunk] = hasher.digest();
    faultPoint(FaultPoint::mid_chunk, job.step);
    const int64_t now = clock_.nowNs();
    job.copy_ns.fetch_add(now - fetched.begin_ns);
    countCopy(job.step, fetched.tier, fetched.begin_ns, now, bytes);
  }
  chunkDone(job);
  return bytes;
}

// At the gate.
void SnapshotEngine::holdTraining(Job& job, std::span<const DeviceStream> streams) {
  if (device_copy_->capturing(streams)) {
    // Replays of the graph will write whenever they like.
    job.failed.store(true);
    note("step " + std::to_string(job.step) + " dropped: the optimizer's step is captured into a graph");
  }
  {
    const std::lock_guard lock(job.fetch_mutex);
    fetchOrdered(job);
    while (fetchOne(job, Tier::kGate)) {
    }
    markGate(OpEvent::kGate, streams);
    if (!job.failed.load() && !device_copy_->hold(streams)) {
      job.failed.store(true);
    }
    markGate(OpEvent::kDone, streams);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!job.compared) {
      compareVersions(job);
    }
  }
  release(job, /*at_gate=*/true);
}

}  // namespace reft
