// What is different in a snapshot with regions on devices: a chunk is fetched (its copies are asked
// for, what lies on the host is copied) and landed (its copies are awaited and its bytes hashed)
// apart, and the gate holds back the device instead of the host.
//
// Everything that was fetched before the gate asked is in the copy streams, because a chunk is
// taken and fetched under one lock; so the streams that train, which the gate makes wait for the
// copy streams, cannot overtake a copy.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "intercept/base/error.h"
#include "intercept/base/fault.h"
#include "snapshot/engine/engine.h"
#include "snapshot/engine/engine_job.h"
#include "snapshot/placement/op_listener.h"
#include "snapshot/vault/copy.h"

namespace reft {

namespace {

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(1000);
constexpr size_t kFetchedAhead = 8;  // chunks
// The copy thread asks for more only while fewer copies are under way, and then until there are
// twice as many. A stream takes about a thousand calls; the next one waits in the driver, under
// locks that the thread that trains needs as well.
constexpr size_t kFewCalls = 128;
constexpr uint64_t kMostHostBytes =
    uint64_t{16} << 20;  // that it copies by itself while the gate may wait for it
constexpr int64_t kToldDeviceGateNs = 5000;  // two events in a row are a few microseconds apart
constexpr size_t kMostDeviceSteps = 1024;    // that wait for the next program point
constexpr const char* kCaptured =
    "the optimizer's step is captured into a graph, or another stream is and forbids the legacy "
    "stream's use";
constexpr int64_t kProbeNs =
    1'000'000'000;  // of waiting, until the device is asked whether it has failed

}  // namespace

// Why no snapshot can be begun; empty: it has, and copies wait for this point of the streams.
std::string SnapshotEngine::beginOnDevices(std::span<const DeviceStream> streams) {
  if (device_copy_ == nullptr) {
    device_copy_ =
        std::make_unique<DeviceCopy>(options_.cuda == nullptr ? cudaApi() : *options_.cuda);
    vault_.beforeMove([this](std::byte* payload) { device_copy_->unpin(payload); });
  }
  if (const auto capture = device_copy_->capturing(streams);
      capture != DeviceCopy::Capture::kNone) {
    if (capture == DeviceCopy::Capture::kThese) {
      expectReplays();
    }
    return kCaptured;
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

// The program point as the device comes to it.
void SnapshotEngine::pointOnDevice(int64_t step, std::span<const DeviceStream> streams) {
  marked_step_ = -1;
  if (options_.device_marks == nullptr || device_copy_ == nullptr) {
    return;
  }
  if (streams.size() != 1) {
    options_.device_marks->forget();
    return;
  }
  if (device_placement_ == nullptr) {
    auto made = std::make_unique<DevicePlacement>(*device_copy_, *options_.device_marks, clock_);
    const std::lock_guard lock(mutex_);
    device_placement_ = std::move(made);
  }
  if (device_placement_->point(streams.front(), step)) {
    marked_step_ = step;
    marked_ = streams.front();
  }
}

// At the program point. Chunks that the next forward may write go first, and the device's next work
// waits for them; under `sync`, for all of them.
void SnapshotEngine::fetchAtPoint(Job& job) {
  const std::lock_guard lock(job.fetch_mutex);
  const SnapshotTable& table = job.plan->table;
  const bool everything = job.policy == PlacementPolicy::kSync && !job.left_to_gate;
  const uint64_t early = std::min(job.plan->early_chunks * table.chunk_bytes, table.payload_bytes);
  job.chunks_left.store(job.plan->chunk_count);
  const uint64_t bytes = everything ? table.payload_bytes : early;
  bool ordered = device_copy_->begin(job.writers);
  const bool hold = fetchAside(job) || everything || bytes != 0;
  if (job.placed) {
    const auto policy = job.left_to_gate ? std::nullopt : std::optional(job.policy);
    device_placement_->begin(policy, table.chunk_bytes, table.payload_bytes - bytes);
  }
  if (bytes != 0) {
    fetchBatch(job, {.tier = Tier::kAtOnce, .step = job.step}, bytes, /*limited=*/false);
  }
  if (hold) {
    ordered = ordered && device_copy_->hold(job.streams) && device_copy_->hold(job.writers);
  }
  if (!ordered) {
    job.failed.store(true);
  }
  if (everything) {
    const std::lock_guard versions_lock(mutex_);
    compareVersions(job);  // what training writes from here on, it writes behind the copy
  }
}

// What is no chunk: parts of the objects, and the lines that replicas are compared by. They are
// few, so no tier is asked for them. True: the streams have to wait for them, because what they are
// may be written before the gate. Under the job's fetch_mutex.
bool SnapshotEngine::fetchAside(Job& job) {
  size_t bytes = job.replica_lines.size() * ReplicaLine::kGroupBytes;
  for (const ObjectPart& part : job.parts) {
    bytes += part.bytes;
  }
  if (bytes == 0) {
    return false;
  }
  if (bytes > aside_bytes_) {
    aside_bytes_ = std::max(kPage, std::bit_ceil(bytes));
    aside_memory_ = device_copy_->memory(aside_bytes_);
  }
  Fetched fetched;
  fetched.aside = true;
  fetched.begin_ns = clock_.nowNs();
  bool fine = aside_memory_ != nullptr;
  bool hold = !job.parts.empty();
  std::byte* to = aside_memory_;
  for (const auto& [group, lines] : job.replica_lines) {
    for (size_t i = 0; fine && i < lines.size(); ++i) {
      const uint32_t region = job.plan->group_regions[group][lines[i].region];
      hold = hold || job.plan->table.regions[region].early;
      fine = fetch(fetched, job.devices[region], job.addresses[region] + lines[i].offset,
                   to + i * ReplicaLine::kMostBytes, lines[i].bytes);
    }
    to += ReplicaLine::kGroupBytes;
  }
  for (const ObjectPart& part : job.parts) {
    fine = fine &&
           fetch(fetched, part.device, static_cast<const std::byte*>(part.from), to, part.bytes);
    to += part.bytes;
  }
  submit(job, fetched, fine);
  job.chunks_left.fetch_add(1);
  return hold;
}

// What was fetched aside has landed.
void SnapshotEngine::landAside(Job& job) {
  const std::byte* at = aside_memory_;
  for (const auto& [group, lines] : job.replica_lines) {
    job.group_digests[group] = replicaDigest(lines, at, static_cast<uint64_t>(job.step));
    at += ReplicaLine::kGroupBytes;
  }
  const auto slot = static_cast<uint32_t>(job.slot);
  for (const ObjectPart& part : job.parts) {
    vault_.putObjectPart(slot, part.offset, {at, part.bytes});
    at += part.bytes;
  }
  if (!job.parts.empty()) {
    vault_.hashObjects(slot, job.object_bytes);
  }
}

// Asks for a copy; one from the host is made. False: it cannot be asked for.
bool SnapshotEngine::fetch(Fetched& fetched, int device, const std::byte* from, std::byte* to,
                           uint64_t bytes) {
  if (device < 0) {
    std::memcpy(to, from, bytes);
    fetched.host_bytes += bytes;
    return true;
  }
  ++fetched.calls;
  if (std::none_of(fetched.tickets.begin(), fetched.tickets.end(),
                   [&](const auto& t) { return t.device == device; })) {
    fetched.tickets.push_back({device, 0});
  }
  return device_copy_->copy(device, to, from, bytes);
}

// Everything that `fetched` stands for is asked for (unless not `fine`): somebody has to look for
// it. Under the job's fetch_mutex.
void SnapshotEngine::submit(Job& job, Fetched& fetched, bool fine) {
  for (DeviceCopy::Ticket& ticket : fetched.tickets) {
    fine = fine && device_copy_->submit(ticket.device, ticket);
  }
  if (!fine) {
    job.failed.store(true);
  }
  job.calls += fetched.calls;
  job.to_land.push_back(std::move(fetched));
  job.unlanded.store(job.to_land.size());
}

// Under the job's fetch_mutex. False: it cannot be asked for.
bool SnapshotEngine::fetchChunk(Job& job, Fetched& fetched) {
  fetched.begin_ns = clock_.nowNs();
  if (job.failed.load(std::memory_order_relaxed)) {
    return false;
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
    fine = fetch(fetched, job.devices[piece.region],
                 job.addresses[piece.region] + piece.begin + into, payload + at, bytes);
    at += bytes;
  }
  if (fine && at < end) {
    std::memset(payload + at, 0, end - at);
  }
  return fine;
}

// The next chunk that somebody has to look for: one that was fetched already, else the next one.
// nullopt: there is none. A few are fetched ahead, so that the copy stream has work while the one
// before is hashed.
std::optional<SnapshotEngine::Fetched> SnapshotEngine::fetchNext(Job& job, Tier tier) {
  const std::lock_guard lock(job.fetch_mutex);
  while (job.to_land.size() < kFetchedAhead && fetchOne(job, tier)) {
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
  job.calls -= fetched.calls;
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
  const bool fine = fetchChunk(job, fetched);
  submit(job, fetched, fine);
  return true;
}

// Asks for `bytes` of an order, or as much of it as there is and, if `limited`, may be under way;
// between two marks on the copy stream if it is a DevicePlacement's. Under the job's fetch_mutex.
uint64_t SnapshotEngine::fetchBatch(Job& job, const DevicePlacement::Order& order, uint64_t bytes,
                                    bool limited) {
  if (job.next_chunk.load() >= job.plan->chunk_count) {
    return 0;
  }
  const SnapshotTable& table = job.plan->table;
  const auto stamp = [&]() -> std::optional<uint32_t> {
    const auto mark = job.placed ? device_placement_->takeMark() : std::nullopt;
    if (mark && !device_copy_->stamp(job.streams.front().device, device_placement_->event(*mark))) {
      job.failed.store(true);
    }
    return mark;
  };
  const auto begin = stamp();
  uint64_t fetched = 0;
  uint64_t host_bytes = 0;
  while (fetched < bytes && !job.failed.load() && fetchOne(job, order.tier)) {
    const Fetched& newest = job.to_land.back();
    fetched += std::min(table.chunk_bytes, table.payload_bytes - newest.chunk * table.chunk_bytes);
    host_bytes += newest.host_bytes;
    if (limited && (job.calls >= 2 * kFewCalls || host_bytes >= kMostHostBytes)) {
      break;
    }
  }
  const auto end = stamp();
  if (job.placed) {
    device_placement_->ordered(order, fetched, begin, end);
  }
  return fetched;
}

// Asks for the copies of what is ordered by now. Under the job's fetch_mutex.
void SnapshotEngine::fetchOrdered(Job& job, bool limited) {
  for (bool more = true;
       more && job.placed && !job.failed.load() && !(limited && job.calls > kFewCalls);) {
    if (!job.order) {
      job.order = device_placement_->next(job.step);
      if (!job.order) {
        return;
      }
      if (job.order->behind && !device_copy_->after(job.streams.front().device,
                                                    device_placement_->event(*job.order->behind))) {
        job.failed.store(true);
        return;
      }
    }
    const uint64_t fetched = fetchBatch(job, *job.order, job.order->bytes, limited);
    job.order->bytes -= std::min(fetched, job.order->bytes);
    more = fetched == 0 || job.order->bytes == 0;
    if (more) {
      job.order.reset();
    }
  }
}

// What the first copy thread does with a snapshot whose device begins the copies by itself: asks
// for what is ordered, and looks for what has landed, without ever waiting for one when the other
// may be due.
void SnapshotEngine::placeOnDevice(Job& job) {
  const auto let_go = [&] { return job.at_gate.load() || job.failed.load() || stopping_.load(); };
  const auto wake = [&] { return let_go() || options_.device_marks->pending(); };
  auto pause = kFirstPause;
  while (job.hasWork()) {
    if (let_go()) {
      work(job);
      break;
    }
    {
      const std::lock_guard lock(job.fetch_mutex);
      fetchOrdered(job, /*limited=*/true);
    }
    if (job.next_chunk.load() >= job.plan->chunk_count && !job.released.load()) {
      release(job, /*at_gate=*/false);  // the others may help with the hashes
    }
    learnOfDevice();
    if (landNext(job)) {
      pause = kFirstPause;
      continue;
    }
    const int64_t until_ns = job.unlanded.load() != 0
                                 ? clock_.nowNs() + std::chrono::nanoseconds(pause).count()
                                 : device_placement_->nextLookNs();
    events_.sleep(OpEvents::bit(OpEvent::kWaitBegin), until_ns, clock_, wake);
    placement_->hear();
    pause = std::min(kLongestPause, pause * 2);
  }
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

// `hold` is what makes the streams wait for copies. At a program point there is none: a snapshot is
// only brought to its end.
void SnapshotEngine::markGate(std::span<const DeviceStream> streams,
                              const std::function<void()>& hold) {
  const bool marked = device_placement_ != nullptr && streams.size() == 1 && !at_point_;
  if (marked) {
    device_placement_->gateBegin(streams.front());
  }
  hold();
  if (marked) {
    device_placement_->gateEnd(streams.front());
  }
}

bool SnapshotEngine::hasLanded(const Fetched& fetched) const {
  return std::all_of(
      fetched.tickets.begin(), fetched.tickets.end(),
      [&](const DeviceCopy::Ticket& ticket) { return device_copy_->landed(ticket); });
}

// Also waits for what a snapshot that has failed has under way: its slot is given out again. False:
// there is no telling when it lands, and no other snapshot will be begun.
bool SnapshotEngine::awaitLanding(const Fetched& fetched) {
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
  if (!awaitLanding(fetched)) {
    job.failed.store(true);
  }
  if (fetched.aside) {
    if (!job.failed.load()) {
      landAside(job);
    }
    chunkDone(job);
    return 0;
  }
  const uint64_t begin = fetched.chunk * table.chunk_bytes;
  const uint64_t bytes = std::min(table.chunk_bytes, table.payload_bytes - begin);
  if (!job.failed.load()) {
    thread_local ChunkHasher hasher;
    hasher.reset();
    const auto slot = static_cast<uint32_t>(job.slot);
    hasher.hash(vault_.payload(slot) + begin, bytes);
    vault_.chunkHashes(slot)[fetched.chunk] = hasher.digest();
    faultPoint(FaultPoint::mid_chunk, job.step);
    const int64_t now = clock_.nowNs();
    job.copy_ns.fetch_add(now - fetched.begin_ns);
    if (job.placed) {
      vault_.stats().bytes_copied.fetch_add(
          bytes, std::memory_order_relaxed);  // beside what, the device will tell
    } else {
      countCopy(job.step, fetched.tier, fetched.begin_ns, now, bytes);
    }
  }
  chunkDone(job);
  return bytes;
}

// At the gate.
void SnapshotEngine::holdTraining(Job& job, std::span<const DeviceStream> streams) {
  if (const auto capture = device_copy_->capturing(streams);
      capture != DeviceCopy::Capture::kNone) {
    // Replays of the graph will write whenever they like.
    if (capture == DeviceCopy::Capture::kThese) {
      expectReplays();
    }
    job.failed.store(true);
    note("step " + std::to_string(job.step) + " dropped: " + kCaptured);
  }
  {
    const std::lock_guard lock(job.fetch_mutex);
    fetchOrdered(job, /*limited=*/false);
    markGate(streams, [&] {
      // The host is here before its device, which shall not copy before it is here, too.
      if (job.left_to_gate && !job.failed.load() && !device_copy_->begin(streams)) {
        job.failed.store(true);
      }
      fetchBatch(job, {.tier = Tier::kGate, .step = job.step}, job.plan->table.payload_bytes,
                 /*limited=*/false);
      if (!job.failed.load() && !device_copy_->hold(streams)) {
        job.failed.store(true);
      }
    });
  }
  {
    const std::lock_guard lock(mutex_);
    if (!job.compared) {
      compareVersions(job);
    }
  }
  release(job, /*at_gate=*/true);
}

// By the first copy thread: what the device has done meanwhile.
void SnapshotEngine::learnOfDevice() {
  DevicePlacement* placement = nullptr;
  {
    const std::lock_guard lock(mutex_);
    placement = device_placement_.get();
  }
  if (placement == nullptr) {
    return;
  }
  placement->learn();
  const auto untimed = placement->takeUntimed();
  for (size_t tier = 0; tier < kTiers; ++tier) {
    countTier(static_cast<Tier>(tier), untimed[tier]);
  }
  std::vector<DeviceStep> steps = placement->takeSteps();
  if (steps.empty()) {
    return;
  }
  for (const DeviceStep& step : steps) {
    tellStep(step);
  }
  tellForecast(placement->errors());
  const std::lock_guard lock(mutex_);
  for (DeviceStep& step : steps) {
    if (step.whole && device_steps_.size() < kMostDeviceSteps) {
      device_steps_.push_back(std::move(step));
    }
  }
}

// Into the span log and the counters.
void SnapshotEngine::tellStep(const DeviceStep& step) {
  SpanLog& log = vault_.spans();
  const auto tell = [&](SpanKind kind, int64_t begin_ns, int64_t end_ns, uint64_t bytes, Tier tier,
                        OpKind op) {
    const uint64_t span =
        log.begin(kind, step.step, begin_ns, static_cast<uint8_t>(tier), static_cast<uint8_t>(op));
    log.extend(span, end_ns, bytes);
  };
  for (const DeviceWait& wait : step.waits) {
    tell(SpanKind::kDeviceWait, wait.begin_ns, wait.end_ns, wait.bytes,
         wait.bubble ? Tier::kGap : Tier::kCommunication, wait.op);
  }
  for (const DeviceCopies& part : partsOf(step)) {
    tell(SpanKind::kCopy, part.begin_ns, part.end_ns, part.bytes, part.tier, OpKind::kUnknown);
    countTier(part.tier, part.bytes);
  }
  const int64_t gate_ns = step.gate_end_ns - step.gate_begin_ns;
  if (gate_ns > kToldDeviceGateNs) {
    tell(SpanKind::kDeviceGate, step.gate_begin_ns, step.gate_end_ns, 0, Tier::kGate,
         OpKind::kUnknown);
  }
  vault_.stats().device_gate_ns.fetch_add(static_cast<uint64_t>(gate_ns));
  vault_.stats().device_gate_last_ns.store(static_cast<uint64_t>(gate_ns));
  tell(SpanKind::kDeviceStep, step.begin_ns, step.end_ns, 0, Tier::kAtOnce, OpKind::kUnknown);
}

// By the training thread: how long the device took for the steps that it has ended since the last
// program point.
void SnapshotEngine::measureDevice() {
  std::vector<DeviceStep> steps;
  {
    const std::lock_guard lock(mutex_);
    steps.swap(device_steps_);
  }
  for (const DeviceStep& step : steps) {
    if (step.beside_copy) {
      after_gate_.add(step);
      meter_.step(step.block, step.end_ns - step.begin_ns, true);
    } else {
      meter_.step(step.block, withoutSnapshotNs(step, after_gate_.usualNs()), false);
    }
  }
}

}  // namespace reft
