#include "snapshot/engine/device_copier.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "intercept/base/fault.h"
#include "snapshot/engine/snapshot_job.h"
#include "snapshot/engine/telemetry.h"
#include "snapshot/vault/copy.h"
#include "snapshot/vault/live_reader.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(1000);
constexpr size_t kFetchedAhead = 8;  // chunks
// The copy thread fetches more only while fewer calls are under way, and then until there are twice
// as many. A stream takes about a thousand calls; the next one waits in the driver, under locks
// that the thread that trains needs as well.
constexpr size_t kFewCalls = 128;
// Most bytes on the host that one batch copies while the gate may wait for it.
constexpr uint64_t kMostHostBytes = uint64_t{16} << 20;
constexpr int64_t kProbeNs = 1'000'000'000;  // waited, before the device is probed for a failure

}  // namespace

DeviceCopier::DeviceCopier(CopyContext& context, SnapshotJob& job, DeviceTracker& tracker,
                           const CaptureInput& input)
    : Copier(context, job),
      tracker_(tracker),
      copy_(tracker.copy()),
      devices_(input.devices.begin(), input.devices.end()),
      streams_(input.streams.begin(), input.streams.end()),
      writers_(tracker.writersBeside(input.streams, input.writers)),
      parts_(input.parts.begin(), input.parts.end()),
      object_bytes_(input.objects.size()),
      placed_(tracker.follows(input.step)) {
  const SnapshotPlan& plan = *job.plan;
  for (size_t g = 0; g < std::min<size_t>(plan.group_regions.size(), kMaxGroupDigests); ++g) {
    if (plan.table.groups[g].ranks.size() > 1 && groupOnDevice(plan, g, devices_)) {
      replica_lines_.emplace_back(g, replicaLines(plan.group_bytes[g], sampleSeed(job.step)));
    }
  }
}

Copier::Way DeviceCopier::way(const Wanted& wanted) const {
  // Without a gate a late write must not overtake the copy, so the streams wait for it at the
  // point. A control step is copied at the gate: a device that waits at the program point lets the
  // host get ahead, and such a step would be shorter than others.
  const bool held = wanted.gated && !wanted.replays;
  return {held ? wanted.policy : PlacementPolicy::kSync, wanted.control && placed_ && held};
}

// Chunks that the next forward may write go first, and the device's next work waits for them; under
// `sync`, for all of them.
void DeviceCopier::atPoint() {
  const MutexLock lock(mutex_);
  const SnapshotTable& table = job_.plan->table;
  const bool everything = job_.policy == PlacementPolicy::kSync && !job_.control;
  left_.store(job_.plan->chunk_count);
  const uint64_t bytes = everything ? table.payload_bytes : job_.plan->earlyBytes();
  bool ordered = copy_.begin(writers_);
  const bool hold = fetchExtras() || everything || bytes != 0;
  if (placed_) {
    const auto policy = job_.control ? std::nullopt : std::optional(job_.policy);
    tracker_.placement().begin(policy, table.chunk_bytes, table.payload_bytes - bytes);
  }
  if (bytes != 0) {
    fetchBatch({.tier = Tier::kAtOnce, .step = job_.step}, bytes, /*limited=*/false);
  }
  if (hold) {
    ordered = ordered && copy_.hold(streams_) && copy_.hold(writers_);
  }
  if (!ordered) {
    job_.fail();
  }
  if (everything) {
    job_.compare();
  }
}

bool DeviceCopier::fetchExtras() {
  size_t bytes = replica_lines_.size() * ReplicaLine::kGroupBytes;
  for (const ObjectPart& part : parts_) {
    bytes += part.bytes;
  }
  if (bytes == 0) {
    return false;
  }
  extra_memory_ = tracker_.extraMemory(bytes);
  Fetched fetched;
  fetched.extras = true;
  fetched.begin_ns = context_.clock.nowNs();
  bool fine = extra_memory_ != nullptr;
  bool hold = !parts_.empty();
  std::byte* to = extra_memory_;
  for (const auto& [group, lines] : replica_lines_) {
    for (size_t i = 0; fine && i < lines.size(); ++i) {
      const uint32_t region = job_.plan->group_regions[group][lines[i].region];
      hold = hold || job_.plan->table.regions[region].early;
      fine = fetch(fetched, devices_[region], job_.addresses[region] + lines[i].offset,
                   to + i * ReplicaLine::kMostBytes, lines[i].bytes);
    }
    to += ReplicaLine::kGroupBytes;
  }
  for (const ObjectPart& part : parts_) {
    fine = fine &&
           fetch(fetched, part.device, static_cast<const std::byte*>(part.from), to, part.bytes);
    to += part.bytes;
  }
  submit(fetched, fine);
  left_.fetch_add(1);
  return hold;
}

void DeviceCopier::landExtras() {
  const std::byte* at = extra_memory_;
  for (const auto& [group, lines] : replica_lines_) {
    job_.group_digests[group] = replicaDigest(lines, at, static_cast<uint64_t>(job_.step));
    at += ReplicaLine::kGroupBytes;
  }
  for (const ObjectPart& part : parts_) {
    context_.vault.putObjectPart(job_.slot, part.offset, {at, part.bytes});
    at += part.bytes;
  }
  if (!parts_.empty()) {
    context_.vault.hashObjects(job_.slot, object_bytes_);
  }
}

bool DeviceCopier::fetch(Fetched& fetched, int device, const std::byte* from, std::byte* to,
                         uint64_t bytes) {
  if (device < 0) {
    fetched.host_bytes += bytes;
    return fetchFromHost(from, to, bytes);
  }
  use(fetched, device);
  return copy_.copy(device, to, from, bytes);
}

void DeviceCopier::use(Fetched& fetched, int device) {
  ++fetched.calls;
  if (std::none_of(fetched.tickets.begin(), fetched.tickets.end(),
                   [&](const auto& ticket) { return ticket.device == device; })) {
    fetched.tickets.push_back({device, 0});
  }
}

bool DeviceCopier::fetchFromHost(const std::byte* from, std::byte* to, uint64_t bytes) {
  LiveReader& reader = LiveReader::ofThread();
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t part = std::min<uint64_t>(bytes - at, LiveReader::kMostBytes);
    const std::byte* const copy = reader.read(from + at, part);
    if (copy == nullptr) {
      return false;
    }
    std::memcpy(to + at, copy, part);
    at += part;
  }
  return true;
}

void DeviceCopier::submit(Fetched& fetched, bool fine) {
  for (DeviceCopy::Ticket& ticket : fetched.tickets) {
    fine = fine && copy_.submit(ticket.device, ticket);
  }
  if (!fine) {
    job_.fail();
  }
  calls_ += fetched.calls;
  to_land_.push_back(std::move(fetched));
  unlanded_.store(to_land_.size());
}

bool DeviceCopier::fetchChunk(Fetched& fetched) {
  fetched.begin_ns = context_.clock.nowNs();
  if (job_.failed()) {
    return false;
  }
  return job_.plan->first_parity[fetched.chunk] == SnapshotPlan::kNoParity ? fetchPieces(fetched)
                                                                           : fetchParity(fetched);
}

bool DeviceCopier::fetchPieces(Fetched& fetched) {
  const SnapshotPlan& plan = *job_.plan;
  const std::vector<Piece>& pieces = plan.table.pieces;
  std::byte* const payload = context_.vault.payload(job_.slot);
  uint64_t at = fetched.chunk * plan.table.chunk_bytes;
  const uint64_t end = at + plan.chunkBytes(fetched.chunk);
  bool fine = true;
  for (uint32_t i = plan.first_piece[fetched.chunk];
       fine && i < pieces.size() && pieces[i].payload_offset < end; ++i) {
    const Piece& piece = pieces[i];
    if (at < piece.payload_offset) {
      std::memset(payload + at, 0, piece.payload_offset - at);
      at = piece.payload_offset;
    }
    const uint64_t into = at - piece.payload_offset;
    const uint64_t bytes = std::min(end - at, piece.end - piece.begin - into);
    fine = fetch(fetched, devices_[piece.region], job_.addresses[piece.region] + piece.begin + into,
                 payload + at, bytes);
    if (!fine && devices_[piece.region] < 0) {
      job_.verify.lost(piece.region);
    }
    at += bytes;
  }
  if (fine && at < end) {
    std::memset(payload + at, 0, end - at);
  }
  return fine;
}

bool DeviceCopier::fetchParity(Fetched& fetched) {
  const SnapshotPlan& plan = *job_.plan;
  const SnapshotTable& table = plan.table;
  std::byte* const payload = context_.vault.payload(job_.slot);
  uint64_t at = fetched.chunk * table.chunk_bytes;
  const uint64_t end = at + plan.chunkBytes(fetched.chunk);
  for (size_t i = plan.first_parity[fetched.chunk]; at < end; ++i) {
    const bool is_last = i >= table.parities.size() || table.parities[i].payload_offset >= end;
    const uint64_t from = is_last ? end : std::max(at, table.parities[i].payload_offset);
    std::memset(payload + at, 0, from - at);  // padding
    at = from;
    if (is_last) {
      break;
    }
    const ParityPiece& parity = table.parities[i];
    const uint64_t parity_end = parity.payload_offset + (parity.end - parity.begin);
    const uint32_t own = table.memberOf(static_cast<int32_t>(parity.group));
    while (at < std::min(end, parity_end)) {
      const uint64_t bytes = std::min<uint64_t>({DeviceXor::kSumBytes, end - at, parity_end - at});
      const uint64_t begin = parity.begin + (at - parity.payload_offset);
      if (!fetchSum(fetched, *plan.cells[parity.group], own, begin, begin + bytes, at)) {
        return false;
      }
      at += bytes;
    }
  }
  return true;
}

bool DeviceCopier::fetchSum(Fetched& fetched, const ParityCells& cells, uint32_t own,
                            uint64_t begin, uint64_t end, uint64_t at) {
  const uint64_t chunk_begin = fetched.chunk * job_.plan->table.chunk_bytes;
  int device = -1;  // all of the state is on one (snapshot/device/device_xor.h)
  bool fine = true;
  uint64_t put_begin = 0, put_end = 0;  // of a cell's bytes, those that are to be added
  const auto addPut = [&] {
    if (put_begin != put_end) {
      use(fetched, device);
      fine = fine && copy_.addCell(device, put_begin, put_end - put_begin);
    }
  };
  cells.eachUnder(own, begin, end, [&](const std::vector<ShardRange>& ranges) {
    uint64_t into = put_begin = put_end = 0;
    for (const ShardRange& range : ranges) {
      const std::byte* const from = job_.addresses[range.region] + range.begin;
      const uint64_t bytes = range.end - range.begin;
      if (const int there = devices_[range.region]; there >= 0) {
        if (device < 0) {
          device = there;
          use(fetched, device);
          fine = fine && copy_.clearSum(device, end - begin);
        }
        if (put_end != into) {
          addPut();
          put_begin = into;
        }
        use(fetched, device);
        fine = fine && copy_.putIntoCell(device, into, from, bytes);
        put_end = into + bytes;
      } else if (fine) {
        std::vector<std::byte>& part =
            fetched.host_parts.emplace_back(at - chunk_begin + into, std::vector<std::byte>(bytes))
                .second;
        fetched.host_bytes += bytes;
        fine = fetchFromHost(from, part.data(), bytes);
        if (!fine) {
          job_.verify.lost(range.region);
        }
      }
      into += bytes;
    }
    addPut();
  });
  std::byte* const to = context_.vault.payload(job_.slot) + at;
  if (device < 0) {
    std::memset(to, 0, end - begin);
    return fine;
  }
  use(fetched, device);
  return fine && copy_.takeSum(device, to, end - begin);
}

// Lands a chunk that was fetched already, else fetches one. A few are fetched ahead, so that the
// copy stream has work while the one before is hashed.
bool DeviceCopier::copyNext(Tier tier, const Sink& sink) {
  Fetched fetched;
  {
    const MutexLock lock(mutex_);
    while (to_land_.size() < kFetchedAhead && fetchOne(tier)) {
    }
    if (to_land_.empty()) {
      return false;
    }
    fetched = takeFetched();
  }
  if (const uint64_t bytes = land(fetched); bytes != 0 && sink) {
    sink(bytes, fetched.tier);
  }
  return true;
}

DeviceCopier::Fetched DeviceCopier::takeFetched() {
  Fetched fetched = std::move(to_land_.front());
  to_land_.pop_front();
  calls_ -= fetched.calls;
  unlanded_.store(to_land_.size());
  return fetched;
}

bool DeviceCopier::fetchOne(Tier tier) {
  if (!Copier::hasWork()) {
    return false;
  }
  Fetched fetched;
  fetched.chunk = next_.fetch_add(1);
  fetched.tier = tier;
  const bool fine = fetchChunk(fetched);
  submit(fetched, fine);
  return true;
}

// A mark on the copy stream, for the placement's times.
std::optional<uint32_t> DeviceCopier::stamp() {
  const auto mark = placed_ ? tracker_.placement().takeMark() : std::nullopt;
  if (mark && !copy_.stamp(streams_.front().device, tracker_.placement().event(*mark))) {
    job_.fail();
  }
  return mark;
}

uint64_t DeviceCopier::fetchBatch(const DevicePlacement::Order& order, uint64_t bytes,
                                  bool limited) {
  if (!Copier::hasWork()) {
    return 0;
  }
  const auto begin = stamp();
  uint64_t fetched = 0;
  uint64_t host_bytes = 0;
  while (fetched < bytes && !job_.failed() && fetchOne(order.tier)) {
    const Fetched& newest = to_land_.back();
    fetched += job_.plan->chunkBytes(newest.chunk);
    host_bytes += newest.host_bytes;
    if (limited && (calls_ >= 2 * kFewCalls || host_bytes >= kMostHostBytes)) {
      break;
    }
  }
  const auto end = stamp();
  if (placed_) {
    tracker_.placement().ordered(order, fetched, begin, end);
  }
  return fetched;
}

void DeviceCopier::fetchOrdered(bool limited) {
  for (bool more = true; more && placed_ && !job_.failed() && !(limited && calls_ > kFewCalls);) {
    if (!order_) {
      order_ = tracker_.placement().next(job_.step);
      if (!order_) {
        return;
      }
      if (order_->behind &&
          !copy_.after(streams_.front().device, tracker_.placement().event(*order_->behind))) {
        job_.fail();
        return;
      }
    }
    const uint64_t fetched = fetchBatch(*order_, order_->bytes, limited);
    order_->bytes -= std::min(fetched, order_->bytes);
    more = fetched == 0 || order_->bytes == 0;
    if (more) {
      order_.reset();
    }
  }
}

// A device that begins the copies by itself: fetches what is ordered and lands what has arrived,
// and never waits for one while the other may be due.
void DeviceCopier::place() {
  if (!placed_) {
    Copier::place();
    return;
  }
  const auto let_go = [&] { return job_.atGate() || job_.failed() || context_.stopping.load(); };
  const auto wake = [&] { return let_go() || tracker_.hasMarks(); };
  auto pause = kFirstPause;
  while (hasWork()) {
    if (let_go()) {
      copyRest();
      break;
    }
    {
      const MutexLock lock(mutex_);
      fetchOrdered(/*limited=*/true);
    }
    if (!Copier::hasWork() && !job_.released()) {
      release(/*at_gate=*/false);  // others may help with the hashes
    }
    tracker_.learn([&](const auto& learned) { context_.telemetry.device(learned); });
    if (landNext()) {
      pause = kFirstPause;
      continue;
    }
    const int64_t until_ns = unlanded_.load() != 0
                                 ? context_.clock.nowNs() + std::chrono::nanoseconds(pause).count()
                                 : tracker_.placement().nextLookNs();
    context_.events.sleep(OpEvents::bit(OpEvent::kWaitBegin), until_ns, context_.clock, wake);
    context_.listener.update();
    pause = std::min(kLongestPause, pause * 2);
  }
}

bool DeviceCopier::landNext() {
  Fetched fetched;
  {
    const MutexLock lock(mutex_);
    if (to_land_.empty() || !hasLanded(to_land_.front())) {
      return false;
    }
    fetched = takeFetched();
  }
  land(fetched);
  return true;
}

bool DeviceCopier::hasLanded(const Fetched& fetched) const {
  return std::all_of(fetched.tickets.begin(), fetched.tickets.end(),
                     [&](const DeviceCopy::Ticket& ticket) { return copy_.landed(ticket); });
}

// Also waits for copies of a snapshot that has failed: its slot is given out again.
bool DeviceCopier::awaitLanding(const Fetched& fetched) {
  auto pause = kFirstPause;
  int64_t probe_ns = context_.clock.nowNs() + kProbeNs;
  while (!hasLanded(fetched)) {
    if (context_.stopping.load() || !copy_.usable()) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(kLongestPause, pause * 2);
    if (context_.clock.nowNs() >= probe_ns) {
      for (const DeviceCopy::Ticket& ticket : fetched.tickets) {
        copy_.probe(ticket.device);
      }
      probe_ns = context_.clock.nowNs() + kProbeNs;
    }
  }
  return true;
}

uint64_t DeviceCopier::land(const Fetched& fetched) {
  if (!awaitLanding(fetched)) {
    job_.fail();
  }
  if (fetched.extras) {
    if (!job_.failed()) {
      landExtras();
    }
    chunkDone();
    return 0;
  }
  const uint64_t bytes = job_.plan->chunkBytes(fetched.chunk);
  if (!job_.failed()) {
    thread_local ChunkHasher hasher;
    std::byte* const chunk =
        context_.vault.payload(job_.slot) + fetched.chunk * job_.plan->table.chunk_bytes;
    for (const auto& [at, part] : fetched.host_parts) {
      xorInto(chunk + at, part.data(), part.size());
    }
    hasher.reset();
    hasher.hash(chunk, bytes);
    context_.vault.chunkHashes(job_.slot)[fetched.chunk] = hasher.digest();
    faultPoint(FaultPoint::mid_chunk, job_.step);
    const int64_t now = context_.clock.nowNs();
    job_.copy_ns.fetch_add(now - fetched.begin_ns);
    if (placed_) {
      context_.telemetry.copiedUntimed(bytes);
    } else {
      context_.telemetry.copied(job_.step, fetched.tier, fetched.begin_ns, now, bytes);
    }
  }
  chunkDone();
  return bytes;
}

void DeviceCopier::gate(std::span<const DeviceStream> streams) {
  if (streams.empty()) {
    streams = streams_;
  }
  if (const auto capture = copy_.capturing(streams); capture != DeviceCopy::Capture::kNone) {
    if (capture == DeviceCopy::Capture::kThese) {
      context_.expect_replays();  // replays of the graph write whenever they like
    }
    job_.fail();
    context_.telemetry.note("step " + std::to_string(job_.step) + " dropped: " + kCapturing);
  }
  {
    const MutexLock lock(mutex_);
    fetchOrdered(/*limited=*/false);
    tracker_.gate(streams, [&]() REQUIRES(mutex_) {
      // The host is here before its device, and copies of a control step begin when the device is.
      if (job_.control && !job_.failed() && !copy_.begin(streams)) {
        job_.fail();
      }
      fetchBatch({.tier = Tier::kGate, .step = job_.step}, job_.plan->table.payload_bytes,
                 /*limited=*/false);
      if (!job_.failed() && !copy_.hold(streams)) {
        job_.fail();
      }
    });
  }
  job_.compare();
  release(/*at_gate=*/true);
}

}  // namespace reft
