#include "python/rank/rank.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "c10d_backend/pending_writes.h"
#include "c10d_backend/store/store_commit.h"
#include "intercept/base/error.h"
#include "intercept/base/voice.h"
#include "intercept/record/cut.h"
#include "intercept/record/device_marks.h"
#include "intercept/record/op_events.h"
#include "intercept/record/op_log.h"
#include "python/rank/cores.h"

namespace reft {

namespace {

// Small states get small chunks, because early regions are padded to a whole one.
constexpr uint64_t kLeastChunkBytes = uint64_t{64} << 10;
constexpr uint64_t kChunksOfAState = 64;

std::atomic<Rank*> current_rank{nullptr};

void sayAlarm(int rank, std::chrono::nanoseconds limit, bool unprotected) {
  const std::string who = "rank " + std::to_string(rank) + ": training is ";
  if (!unprotected) {
    say(who + "protected again");
    return;
  }
  const auto seconds = std::chrono::round<std::chrono::seconds>(limit).count();
  warn(who + "UNPROTECTED: collectives progress, but no snapshot was committed for " +
       std::to_string(seconds) +
       " s. If no torch.optim optimizer steps (foreign optimizer, captured graph), call "
       "reft.step() after each training step; `reft top` shows why");
}

// The vault's op log area was sized when the vault was made; an adopted one may differ from today's
// setting.
uint32_t fittingRecords(const Vault& vault, uint32_t wanted) {
  uint32_t fits = wanted;
  while (fits > 1 && OpLog::areaBytes(fits) > vault.opLogBytes()) {
    fits /= 2;
  }
  return fits;
}

}  // namespace

class Rank::OnlyOne {
 public:
  explicit OnlyOne(Rank* rank) {
    Rank* none = nullptr;
    if (!claimed_.compare_exchange_strong(none, rank)) {
      throw Unavailable(
          "this process has a snapshot engine already, and cannot have a second one: end the first "
          "session before");
    }
  }
  ~OnlyOne() { claimed_.store(nullptr); }
  OnlyOne(const OnlyOne&) = delete;
  OnlyOne& operator=(const OnlyOne&) = delete;

 private:
  static inline std::atomic<Rank*> claimed_{nullptr};
};

Rank* Rank::current() {
  Rank* const rank = current_rank.load();
  return rank != nullptr && rank->owner_ == ::getpid() ? rank : nullptr;
}

Rank::Rank(Start start)
    : owner_(::getpid()),
      only_one_(std::make_unique<OnlyOne>(this)),
      client_(start.client),
      identity_(start.identity),
      chunk_bytes_(start.options.chunk_bytes),
      slot_wait_(start.options.slot_wait),
      protection_(start.options.redundancy.stored),
      domain_of_(std::move(start.domain_of)),
      hold_still_(start.hold_still),
      let_go_(start.let_go) {
  const VaultIdentity vault_identity{identity_.job, identity_.rank, identity_.world};
  const bool adopts = static_cast<bool>(start.adopted);
  vault_ = adopts ? Vault::adopt(std::move(start.adopted), vault_identity)
                  : Vault::create(vault_identity, start.options.slots, start.options.op_log_records,
                                  start.vault_path);
  try {
    processOpLog().moveTo(vault_->opLogArea(),
                          fittingRecords(*vault_, start.options.op_log_records));
    processCut().restart();
    RankStats& stats = vault_->stats();
    std::memset(static_cast<void*>(&stats), 0, sizeof(stats));
    stats.pid.store(static_cast<uint64_t>(::getpid()));
    stats.attempt.store(identity_.attempt);
    // A vault that is new is in place of a lost one then (snapshot/restore/inventory.h).
    stats.restored_step.store(static_cast<uint64_t>(start.plan == nullptr ? -1 : start.plan->step));
    stats.started_at.store(static_cast<uint64_t>(
        std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count()));
    const int resumes_world = start.plan == nullptr ? 0 : start.plan->savedBy();
    stats.resumes_world.store(static_cast<uint64_t>(resumes_world));
    engine_ = std::make_unique<SnapshotEngine>(
        engineOptions(start), *vault_,
        [client = client_.get()](const wire::Ballot& ballot) { client->vote(ballot); });
    processOpLog().tell(&processOpEvents());
    startVotes(start);
    client_->putVault(vault_->fd(), nlohmann::json{{"rank", identity_.rank},
                                                   {"bytes", vault_->bytes()},
                                                   {"resumes_world", resumes_world}}
                                        .dump());
    if (adopts && start.plan != nullptr && start.plan->takesOwn(identity_.rank)) {
      const VaultPlace& place = start.plan->vaults.at(static_cast<size_t>(identity_.rank));
      engine_->adopt(place.slot, start.plan->step, start.plan->incarnation);
    }
  } catch (...) {
    let_go_([this] { stop(); });
    throw;
  }
  current_rank.store(this);  // last: an engine that could not be made is not checked
}

Rank::~Rank() {
  if (::getpid() != owner_) {
    // Their destructors would join threads, and take locks that these held, but the threads stayed
    // in the parent. The op log is in the vault's memory.
    static_cast<void>(engine_.release());
    static_cast<void>(commit_.release());
    static_cast<void>(vault_.release());
    return;
  }
  current_rank.store(nullptr);  // with the GIL: check() does not run, and does not begin any more
  let_go_([this] { stop(); });
}

void Rank::stop() {
  client_->handle(wire::Type::kOutcome, [](const wire::Frame&) {});
  client_->handle(wire::Type::kNodeVote, [](const wire::Frame&) {});
  commit_.reset();
  processOpLog().tell(nullptr);
  engine_.reset();
  // Back to private memory: ops may still be logged after the vault is unmapped.
  processOpLog().moveTo(nullptr, 0);
}

EngineOptions Rank::engineOptions(const Start& start) const {
  const RankOptions& from = start.options;
  EngineOptions options;
  options.rank = identity_.rank;
  options.incarnation = identity_.incarnation;
  options.copy_threads = std::max(from.copy_threads, 1u);
  options.device_copy_threads = from.copy_threads > 0
                                    ? from.copy_threads
                                    : threadsForDevices(identity_.world, identity_.nodes);
  options.policy = from.policy;
  options.events = &processOpEvents();
  options.device_marks = &processDeviceMarks();
  options.ask_check = start.ask_check;
  options.verify_full = from.verify_full;
  options.slot_wait = slotWait(from.redundancy.copied);
  options.alarm = from.alarm;
  options.cadence.base = from.every;
  options.cadence.limit_ppm = int64_t{from.overhead_percent} * 10'000;
  options.cadence.decides = identity_.rank == 0;
  if (from.alarm.count() > 0) {
    options.cadence.longest_ns =
        from.alarm.count() / 4;  // rare snapshots are no reason for an alarm
  }
  options.control_every = from.control_every;
  options.ops_begun = [area = vault_->opLogArea(), bytes = vault_->opLogBytes()]() -> uint64_t {
    try {
      return OpLogReader(area, bytes).opsBegun();
    } catch (const Corruption&) {
      return 0;  // the disk under the vault has failed
    }
  };
  options.on_alarm = [rank = identity_.rank, limit = from.alarm](bool unprotected) {
    sayAlarm(rank, limit, unprotected);
  };
  return options;
}

void Rank::startVotes(const Start& start) {
  client_->handle(wire::Type::kOutcome, [this](const wire::Frame& frame) {
    if (const auto ballot = wire::decodeBallot(frame.payload)) {
      engine_->outcome(*ballot);
    }
  });
  if (identity_.nodes == 1) {
    return;
  }
  // Agents do not know each other: the first rank of each node carries their votes through the
  // job's store.
  commit_ = std::make_unique<StoreCommit>(
      start.store, start.seal, StoreCommit::Place{start.node, identity_.nodes},
      // Weak: an abandoned thread must not keep this rank connected.
      [client = std::weak_ptr(client_)](const wire::Ballot& outcome) {
        if (const auto connected = client.lock()) {
          connected->send(wire::Type::kJobOutcome,
                          {reinterpret_cast<const char*>(&outcome), sizeof(outcome)});
        }
      });
  client_->handle(wire::Type::kNodeVote, [this](const wire::Frame& frame) {
    if (const auto ballot = wire::decodeBallot(frame.payload)) {
      commit_->vote(*ballot);
    }
  });
}

MemberNodes Rank::nodesOf(const GroupInfo& group) const {
  MemberNodes nodes;
  for (const int rank : group.ranks) {
    nodes.push_back(domain_of_.at(static_cast<size_t>(rank)));
  }
  return nodes;
}

void Rank::protect(std::string_view setting) {
  const Redundancy redundancy = redundancyNamed(setting);
  protection_ = redundancy.stored;
  engine_->protectionChanged(slotWait(redundancy.copied));
}

// A slot is in use until the agents' copies of it (agent/mesh/) are there, which may take longer
// than a step: training does not wait for that.
std::chrono::nanoseconds Rank::slotWait(bool copied) const {
  return copied ? std::chrono::nanoseconds{0} : slot_wait_;
}

void Rank::setTable(const std::vector<Region>& regions, std::vector<GroupInfo> groups,
                    std::vector<SplitTensor> splits, bool plan_anew) {
  std::vector<RegionInfo> infos;
  uint64_t total = 0;
  for (const Region& region : regions) {
    RegionInfo info = regionInfo(region.name, region.tensor);
    info.group = region.group;
    info.early = region.early;
    info.replaceable = region.replaceable;
    total += info.bytes;
    infos.push_back(std::move(info));
  }
  const uint64_t chunk =
      std::min(chunk_bytes_, std::max(kLeastChunkBytes, std::bit_ceil(total / kChunksOfAState)));
  regions_ = infos;
  addresses_.clear();
  std::vector<std::vector<uint32_t>> held;
  std::vector<int> devices;
  for (const Region& region : regions) {
    devices.push_back(deviceOf(region.tensor));
  }
  const bool has_parities = protection_->hasParities() &&
                            DeviceXor::hindrance(cudaApi(), devices).empty() &&
                            engine_->prepareParities(devices);
  for (GroupInfo& group : groups) {
    const MemberNodes nodes = nodesOf(group);
    group.sets = protection_->paritySets(nodes);
    const auto own = std::lower_bound(group.ranks.begin(), group.ranks.end(), identity_.rank);
    std::vector<uint32_t>& parts = held.emplace_back(
        protection_->placement(nodes).at(static_cast<size_t>(own - group.ranks.begin())));
    if (!has_parities) {  // the planner warns
      std::erase_if(parts, [&](uint32_t part) { return part >= group.ranks.size(); });
    }
  }
  engine_->setTable(buildTable(identity_.rank, identity_.world, std::move(infos), std::move(groups),
                               std::string(protection_->name()), held, chunk, std::move(splits)),
                    plan_anew);
}

// Whether every region has memory of its own. They had when the table was set, so it is enough to
// look when one has moved.
bool Rank::standsApart(const std::vector<const void*>& addresses) {
  if (addresses == addresses_) {
    return true;
  }
  std::vector<const void*> sorted = addresses;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return false;
  }
  addresses_ = addresses;
  return true;
}

CaptureResult Rank::capture(const Point& point) {
  if (point.tensors.size() != regions_.size()) {
    return CaptureResult::kNoTable;
  }
  auto versions = std::make_shared<TensorVersions>();
  std::vector<const void*> addresses;
  std::vector<int> devices;
  addresses.reserve(point.tensors.size());
  for (size_t i = 0; i < point.tensors.size(); ++i) {
    const at::Tensor& tensor = point.tensors[i];
    if (!fitsRegion(tensor, regions_[i])) {
      return CaptureResult::kNoTable;
    }
    addresses.push_back(versions->add(tensor));
    if (addresses.back() == nullptr) {
      return CaptureResult::kNoTable;
    }
    devices.push_back(deviceOf(tensor));
  }
  if (!standsApart(addresses)) {
    return CaptureResult::kNoTable;
  }
  std::vector<PendingWrites::Range> memory;
  memory.reserve(addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(addresses[i]);
    memory.push_back({begin, begin + regions_[i].bytes});
  }
  if (const auto pending = processPendingWrites().find(memory)) {
    engine_->passOver(point.step,
                      std::string(opKindName(pending->kind)) + " still writes " +
                          regions_[pending->index].name +
                          " when the optimizer step returns: call wait() on that op first",
                      false);
    return CaptureResult::kUnderWay;
  }
  std::vector<ObjectPart> parts;
  for (const Part& part : point.parts) {
    if (!part.tensor.is_cuda() || !part.tensor.is_contiguous()) {
      throw InvalidArgument("part", "on the host, or not contiguous",
                            "contiguous tensors on CUDA devices");
    }
    parts.push_back(
        {part.tensor.const_data_ptr(), deviceOf(part.tensor), part.offset, part.tensor.nbytes()});
    versions->keep(part.tensor);
  }
  const std::vector<DeviceStream> streams = currentStreams(devices);
  CaptureInput input;
  input.step = point.step;
  input.addresses = addresses;
  input.devices = devices;
  input.streams = streams;
  input.versions = versions;
  input.objects = point.objects;
  input.parts = parts;
  input.writers = point.writers;
  input.cut = processCut().value();
  input.gated = point.gated;
  input.still = hold_still_;
  input.checkable = ::gettid() == ::getpid();  // the main thread is the one that can be asked
  const CaptureResult result = engine_->capture(input);
  // A snapshot that was not taken may have left an earlier one under way, which still reads what it
  // holds.
  if (result == CaptureResult::kTaken || !engine_->busyOnDevice()) {
    dropped_ = std::move(held_);
    held_ = std::move(versions);
    devices_ = std::move(devices);
  } else {
    dropped_ = std::move(versions);
  }
  return result;
}

int64_t Rank::gate() {
  return engine_->gate(streams());
}

void Rank::freeCopied() {
  dropped_.reset();
  if (!engine_->busyOnDevice()) {
    held_.reset();
  }
}

}  // namespace reft
