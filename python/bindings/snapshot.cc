#include "python/bindings/snapshot.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <bit>
#include <nlohmann/json.hpp>

#include "c10d_backend/current_stream.h"
#include "c10d_backend/store/store_commit.h"
#include "intercept/base/error.h"
#include "intercept/driver/cuda_api.h"
#include "intercept/record/cut.h"
#include "intercept/record/op_events.h"
#include "intercept/record/op_log.h"
#include "python/bindings/base.h"
#include "snapshot/engine/engine.h"
#include "snapshot/restore/agreement.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "snapshot/vault/writer.h"

namespace py = pybind11;

namespace reft {

namespace {

// Tensors of one capture. Holds the storages, because user code may drop or swap a tensor's memory
// before the copy is done, and the version counters, which outlive the tensors.
class TensorVersions final : public VersionReader {
 public:
  void add(const at::Tensor& tensor) {
    storages_.push_back(tensor.storage());
    // Inference tensors keep no versions; writes to them are found by samples alone.
    counters_.push_back(tensor.is_inference() ? c10::VariableVersion(c10::VariableVersion::DISABLED)
                                              : tensor.unsafeGetTensorImpl()->version_counter());
  }
  // Keeps its memory as well.
  void keep(const at::Tensor& tensor) { storages_.push_back(tensor.storage()); }
  uint64_t version(size_t region) const noexcept override {
    const c10::VariableVersion& counter = counters_[region];
    return counter.enabled() ? counter.current_version() : 0;
  }

 private:
  std::vector<c10::Storage> storages_;
  std::vector<c10::VariableVersion> counters_;
};

at::Tensor unpack(py::handle handle) {
  if (!THPVariable_Check(handle.ptr())) {
    throw InvalidArgument("region", std::string(py::str(py::type::handle_of(handle))), "a tensor");
  }
  return THPVariable_Unpack(handle.ptr());
}

// Whether the tensor's elements fill one span of memory: only such a span can be copied as bytes.
bool dense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_neg() && !tensor.is_conj();
}

// The stream that this thread works on now, of each device in `devices`.
std::vector<DeviceStream> currentStreams(const std::vector<int>& devices) {
  std::vector<DeviceStream> streams;
  for (const int index : devices) {
    if (index >= 0 && std::none_of(streams.begin(), streams.end(),
                                   [&](const DeviceStream& s) { return s.device == index; })) {
      streams.push_back(
          currentStream({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}));
    }
  }
  return streams;
}

PlacementPolicy policyNamed(const std::string& name) {
  for (const auto policy :
       {PlacementPolicy::kEager, PlacementPolicy::kGap, PlacementPolicy::kSync}) {
    if (name == placementPolicyName(policy)) {
      return policy;
    }
  }
  throw InvalidArgument("policy", name, "eager, gap or sync");
}

// The engine whose snapshot the main thread checks between two bytecodes; guarded by the GIL.
SnapshotEngine* checked_engine = nullptr;

int checkSnapshot(void* /*unused*/) {
  if (checked_engine != nullptr) {
    checked_engine->check();
  }
  return 0;
}

class Engine {
 public:
  Engine(std::shared_ptr<AgentClient> client, const std::string& job, int rank, int world,
         uint32_t slots, uint32_t op_log_records, const std::string& path, int adopt_fd,
         uint64_t incarnation, uint64_t attempt, const c10::intrusive_ptr<c10d::Store>& store,
         int nodes, uint32_t threads, bool verify_full, double slot_wait_sec, double alarm_sec,
         uint64_t chunk_bytes, const std::string& policy, uint32_t every, double overhead_percent,
         uint32_t control_every)
      : Engine(std::move(client), chunk_bytes) {
    const VaultIdentity identity{job, rank, world};
    vault_ = adopt_fd >= 0 ? Vault::adopt(UniqueFd(::fcntl(adopt_fd, F_DUPFD_CLOEXEC, 3)), identity)
                           : Vault::create(identity, slots, op_log_records, path);
    const auto capacity = static_cast<uint32_t>(op_log_records);
    processOpLog().moveTo(vault_->opLogArea(), fitting(capacity));
    processCut().restart();
    RankStats& stats = vault_->stats();
    std::memset(static_cast<void*>(&stats), 0, sizeof(stats));
    stats.pid.store(static_cast<uint64_t>(::getpid()));
    stats.attempt.store(attempt);
    stats.restored_step.store(static_cast<uint64_t>(-1));
    EngineOptions options;
    options.rank = rank;
    options.incarnation = incarnation;
    options.copy_threads = threads;
    options.policy = policyNamed(policy);
    options.events = &processOpEvents();
    options.device_marks = &processDeviceMarks();
    options.ask_check = [] { return Py_AddPendingCall(&checkSnapshot, nullptr) == 0; };
    options.verify_full = verify_full;
    options.slot_wait = std::chrono::nanoseconds(static_cast<int64_t>(slot_wait_sec * 1e9));
    options.alarm = std::chrono::nanoseconds(static_cast<int64_t>(alarm_sec * 1e9));
    options.cadence.base = every;
    options.cadence.limit_ppm = static_cast<int64_t>(overhead_percent * 1e4);
    options.cadence.decides = rank == 0;
    if (alarm_sec > 0) {
      options.cadence.longest_ns =
          options.alarm.count() / 4;  // rare snapshots are no reason for an alarm
    }
    options.control_every = control_every;
    options.ops_begun = [area = vault_->opLogArea(), bytes = vault_->opLogBytes()] {
      return OpLogReader(area, bytes).opsBegun();
    };
    options.on_alarm = [rank, alarm_sec](bool unprotected) {
      if (unprotected) {
        std::fprintf(stderr,
                     "reft: warning: rank %d: training is UNPROTECTED: collectives progress, but "
                     "no snapshot was committed for "
                     "%.0f s. If no torch.optim optimizer steps (foreign optimizer, captured "
                     "graph), call reft.step() after "
                     "each training step; `reft top` shows why\n",
                     rank, alarm_sec);
      } else {
        std::fprintf(stderr, "reft: rank %d: training is protected again\n", rank);
      }
    };
    auto* client_raw = client_.get();
    engine_ = std::make_unique<SnapshotEngine>(
        options, *vault_, [client_raw](const wire::Ballot& ballot) { client_raw->vote(ballot); });
    processOpLog().tell(&processOpEvents());
    client_->handle(wire::Type::kOutcome, [this](const wire::Frame& frame) {
      if (const auto ballot = wire::decodeBallot(frame.payload)) {
        engine_->outcome(*ballot);
      }
    });
    if (nodes > 1) {
      // Agents do not know each other: the first rank of each node carries their votes through the
      // job's store.
      commit_ =
          std::make_unique<StoreCommit>(store, nodes, [client_raw](const wire::Ballot& outcome) {
            client_raw->send(wire::Type::kJobOutcome,
                             {reinterpret_cast<const char*>(&outcome), sizeof(outcome)});
          });
      client_->handle(wire::Type::kNodeVote, [this](const wire::Frame& frame) {
        if (const auto ballot = wire::decodeBallot(frame.payload)) {
          commit_->vote(*ballot);
        }
      });
    }
    client_->putVault(vault_->fd(),
                      nlohmann::json{{"rank", rank}, {"bytes", vault_->bytes()}}.dump());
    checked_engine = engine_.get();  // last: an engine that could not be made is nobody's
  }

  ~Engine() {
    checked_engine = nullptr;
    client_->handle(wire::Type::kOutcome, [](const wire::Frame&) {});
    client_->handle(wire::Type::kNodeVote, [](const wire::Frame&) {});
    commit_.reset();
    processOpLog().tell(nullptr);
    engine_.reset();
    processOpLog().moveTo(
        nullptr, 0);  // back to private memory: ops may still be marked after the vault is unmapped
  }

  void adopt(uint32_t slot, int64_t step, uint64_t incarnation) {
    engine_->adopt(slot, step, incarnation);
    vault_->stats().restored_step.store(static_cast<uint64_t>(step));
  }

  // regions: (name, tensor, group, early); groups: (id, ranks).
  void setTable(const std::vector<std::tuple<std::string, py::object, int32_t, bool>>& regions,
                const std::vector<std::pair<std::string, std::vector<int>>>& groups, int rank,
                int world, const std::string& protection, uint32_t copies) {
    std::vector<RegionInfo> infos;
    for (const auto& [name, handle, group, early] : regions) {
      const at::Tensor tensor = unpack(handle);
      if (!dense(tensor)) {
        throw InvalidArgument("region " + name, "not dense",
                              "tensors whose elements fill one span of memory");
      }
      RegionInfo info;
      info.name = name;
      info.dtype = c10::toString(tensor.scalar_type());
      info.shape = tensor.sizes().vec();
      info.bytes = tensor.nbytes();
      // Rows of dim 0 are contiguous only in the default layout; other dense layouts are not cut.
      info.row_bytes = tensor.is_contiguous() && tensor.dim() > 0 && tensor.size(0) > 0
                           ? info.bytes / static_cast<uint64_t>(tensor.size(0))
                           : info.bytes;
      info.group = group;
      info.early = early;
      infos.push_back(std::move(info));
    }
    std::vector<GroupInfo> group_infos;
    for (const auto& [id, ranks] : groups) {
      group_infos.push_back({id, ranks});
    }
    region_bytes_.clear();
    for (const RegionInfo& info : infos) {
      region_bytes_.push_back(info.bytes);
    }
    uint64_t total = 0;
    for (const RegionInfo& info : infos) {
      total += info.bytes;
    }
    // Small states get small chunks: early regions are padded to a whole one.
    const uint64_t chunk =
        std::min(chunk_bytes_, std::max<uint64_t>(uint64_t{64} << 10, std::bit_ceil(total / 64)));
    SnapshotTable table = buildTable(rank, world, std::move(infos), std::move(group_infos),
                                     protection, copies, chunk);
    const py::gil_scoped_release release;
    engine_->setTable(std::move(table));
  }

  // parts: (contiguous tensor, where in the objects its contents belong). writers: (device of a
  // tensor, stream) that may write them.
  std::string capture(int64_t step, const py::list& tensors, const py::bytes& objects,
                      const std::vector<std::pair<py::object, uint64_t>>& parts,
                      const std::vector<std::pair<int, uint64_t>>& writers, bool gated) {
    if (tensors.size() != region_bytes_.size()) {
      return "no_table";
    }
    auto versions = std::make_shared<TensorVersions>();
    std::vector<const void*> addresses;
    std::vector<int> devices;
    addresses.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor tensor = unpack(tensors[i]);
      if (tensor.nbytes() != region_bytes_[i] || !dense(tensor)) {
        return "no_table";  // the tensor changed its shape: the plan has to be made anew
      }
      addresses.push_back(tensor.const_data_ptr());
      devices.push_back(tensor.is_cuda() ? tensor.get_device() : -1);
      versions->add(tensor);
    }
    std::vector<ObjectPart> object_parts;
    for (const auto& [handle, offset] : parts) {
      const at::Tensor tensor = unpack(handle);
      if (!tensor.is_cuda() || !tensor.is_contiguous()) {
        throw InvalidArgument("part", "on the host, or not contiguous",
                              "contiguous tensors on CUDA devices");
      }
      object_parts.push_back(
          {tensor.const_data_ptr(), tensor.get_device(), offset, tensor.nbytes()});
      versions->keep(tensor);
    }
    const std::vector<DeviceStream> streams = currentStreams(devices);
    std::vector<DeviceStream> other_streams;
    for (const auto& [device, handle] : writers) {
      other_streams.push_back({device, reinterpret_cast<cuda::Stream>(handle)});
    }
    const std::string_view object_view = objects;
    CaptureResult result;
    {
      const py::gil_scoped_release release;
      CaptureInput input;
      input.step = step;
      input.addresses = addresses;
      input.devices = devices;
      input.streams = streams;
      input.versions = versions;
      input.objects = object_view;
      input.parts = object_parts;
      input.writers = other_streams;
      input.cut = processCut().value();
      input.gated = gated;
      input.checkable = ::gettid() == ::getpid();  // pending calls are made by the main thread
      result = engine_->capture(input);
    }
    // A snapshot that was not taken may have left an earlier one under way, which still reads what
    // it holds.
    if (result == CaptureResult::kTaken || !engine_->busyOnDevice()) {
      held_ = std::move(versions);
      devices_ = std::move(devices);
    }
    switch (result) {
      case CaptureResult::kTaken: return "taken";
      case CaptureResult::kNoSlot: return "no_slot";
      case CaptureResult::kNoTable: return "no_table";
      case CaptureResult::kFailed: return "failed";
    }
    return "failed";
  }

  void leaveOut(int64_t step) {
    const py::gil_scoped_release release;
    engine_->leaveOut(step);
  }

  int64_t gate() {
    int64_t waited = 0;
    const std::vector<DeviceStream> streams = currentStreams(devices_);
    {
      const py::gil_scoped_release release;
      waited = engine_->gate(streams);
    }
    if (!engine_->busyOnDevice()) {
      held_.reset();  // with the GIL: the last reference to a storage may free Python objects
    }
    return waited;
  }

  void setPolicy(const std::string& policy) { engine_->setPolicy(policyNamed(policy)); }

  std::vector<uint32_t> takeLateWritten() {
    const py::gil_scoped_release release;
    return engine_->takeLateWritten();
  }
  int64_t committedStep() const { return engine_->committedStep(); }
  bool drain(int64_t timeout_ms) {
    const py::gil_scoped_release release;
    return engine_->drain(std::chrono::milliseconds(timeout_ms));
  }

  bool beginPoint(int64_t step) {
    const std::vector<DeviceStream> streams = currentStreams(devices_);
    const py::gil_scoped_release release;
    return engine_->beginPoint(step, streams);
  }
  void endPoint() {
    const py::gil_scoped_release release;
    engine_->endPoint();
  }
  std::tuple<int64_t, int64_t, int64_t> cadence() const {
    const RankStats& stats = vault_->stats();
    const auto read = [](const std::atomic<uint64_t>& value) {
      return static_cast<int64_t>(value.load());
    };
    return {read(stats.every), read(stats.overhead_ppm), read(stats.overhead_noise_ppm)};
  }
  void setRestoreNs(uint64_t value) { vault_->stats().restore_ns.store(value); }
  py::dict stats() const {
    py::dict result;
    const RankStats& stats = vault_->stats();
#define REFT_STATS_ITEM(name) result[#name] = static_cast<int64_t>(stats.name.load());
    REFT_RANK_STATS(REFT_STATS_ITEM)
#undef REFT_STATS_ITEM
    result["note"] = std::string(stats.note, ::strnlen(stats.note, sizeof(stats.note)));
    result["vault_bytes"] = vault_->bytes();
    result["policy"] = placementPolicyName(engine_->policy());
    return result;
  }
  int fd() const {
    return vault_->fd();
  }

 private:
  // The other constructor calls this one first: what it throws after that, ~Engine() cleans up.
  Engine(std::shared_ptr<AgentClient> client, uint64_t chunk_bytes)
      : client_(std::move(client)), chunk_bytes_(chunk_bytes) {
    if (checked_engine != nullptr) {  // it listens to the ops of this process, and has their log
      throw Unavailable(
          "this process has a snapshot engine, and a second one beside it cannot be: end the first "
          "session before");
    }
  }

  // The vault's op log area was sized when the vault was made; an adopted one may differ from
  // today's setting.
  uint32_t fitting(uint32_t capacity) const {
    uint32_t fits = capacity;
    while (fits > 1 && OpLog::areaBytes(fits) > vault_->opLogBytes()) {
      fits /= 2;
    }
    return fits;
  }

  std::shared_ptr<AgentClient> client_;
  uint64_t chunk_bytes_;
  std::unique_ptr<Vault> vault_;
  std::unique_ptr<SnapshotEngine> engine_;
  std::unique_ptr<StoreCommit> commit_;
  std::shared_ptr<TensorVersions> held_;
  std::vector<uint64_t> region_bytes_;
  std::vector<int> devices_;  // of the regions of the newest snapshot
};

// Reads one sealed slot, for restoring.
class SlotSource {
 public:
  SlotSource(int fd, uint32_t slot, int64_t step, uint64_t incarnation) : reader_(fd) {
    for (const SlotView& view : reader_.slots()) {
      if (view.index == slot && view.step == step && view.incarnation == incarnation) {
        view_ = view;
        table_ = reader_.table(view);
        return;
      }
    }
    throw Corruption("slot " + std::to_string(slot) + " of rank " +
                     std::to_string(reader_.identity().rank) + " no longer holds step " +
                     std::to_string(step));
  }

  py::bytes objects() const { return py::bytes(reader_.objects(view_)); }

  // (name, dtype, shape, bytes, group) of each region.
  py::list regions() const {
    py::list result;
    for (const RegionInfo& r : table_.regions) {
      result.append(py::make_tuple(r.name, r.dtype, r.shape, r.bytes, r.group));
    }
    return result;
  }
  py::list groups() const {
    py::list result;
    for (const GroupInfo& g : table_.groups) {
      result.append(py::make_tuple(g.id, g.ranks));
    }
    return result;
  }
  // (region, shard, begin, end, payload offset) of each piece.
  py::list pieces() const {
    py::list result;
    for (const Piece& p : table_.pieces) {
      result.append(py::make_tuple(p.region, p.shard, p.begin, p.end, p.payload_offset));
    }
    return result;
  }

  // Copies (payload offset, bytes) → (tensor, byte offset). Every chunk is hashed before a byte of
  // it is used; raises Corruption at the first that does not match.
  void copyInto(const std::vector<std::tuple<uint64_t, uint64_t, py::object, uint64_t>>& moves) {
    struct Move {
      uint64_t from, bytes;
      std::byte* to;
    };
    std::vector<Move> list;
    std::vector<at::Tensor> keep;
    std::vector<std::pair<at::Tensor, at::Tensor>> uploads;  // to (bytes on a device), from
    for (const auto& [from, bytes, handle, offset] : moves) {
      at::Tensor tensor = unpack(handle);
      if (!dense(tensor) || offset > tensor.nbytes() || bytes > tensor.nbytes() - offset ||
          from > view_.payload_bytes || bytes > view_.payload_bytes - from) {
        throw InvalidArgument("move", "outside of its tensor or payload", "ranges inside");
      }
      if (tensor.is_cuda()) {
        const at::Tensor all =
            at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage());
        const auto begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) +
                           static_cast<int64_t>(offset);
        const at::Tensor staged = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
        list.push_back({from, bytes, static_cast<std::byte*>(staged.data_ptr())});
        uploads.emplace_back(all.narrow(0, begin, static_cast<int64_t>(bytes)), staged);
        continue;
      }
      list.push_back({from, bytes, static_cast<std::byte*>(tensor.data_ptr()) + offset});
      keep.push_back(std::move(tensor));
    }
    const py::gil_scoped_release release;
    std::sort(list.begin(), list.end(),
              [](const Move& a, const Move& b) { return a.from < b.from; });
    const std::byte* payload = reader_.payload(view_);
    size_t first = 0;
    for (uint64_t chunk = 0; chunk < view_.chunk_count; ++chunk) {
      const uint64_t begin = chunk * view_.chunk_bytes;
      const uint64_t end = begin + view_.chunk_bytes;
      while (first < list.size() && list[first].from + list[first].bytes <= begin) {
        ++first;
      }
      if (first == list.size()) {
        break;
      }
      if (list[first].from >= end) {
        continue;
      }
      const auto faults = reader_.verify(view_, begin, end);
      if (!faults.empty()) {
        throw Corruption("step " + std::to_string(view_.step) + " of rank " +
                         std::to_string(reader_.identity().rank) +
                         ": checksum of the bytes at payload offset " + std::to_string(begin) +
                         " does not match");
      }
      for (size_t i = first; i < list.size() && list[i].from < end; ++i) {
        const uint64_t a = std::max(list[i].from, begin);
        const uint64_t b = std::min(list[i].from + list[i].bytes, end);
        if (a < b) {
          std::memcpy(list[i].to + (a - list[i].from), payload + a, b - a);
        }
      }
    }
    if (!reader_.stillSealed(view_)) {
      throw Corruption("slot was overwritten while it was read");
    }
    for (const auto& [to, staged] : uploads) {
      to.copy_(staged);  // from pageable memory: read before it returns
    }
  }

 private:
  VaultReader reader_;
  SlotView view_;
  SnapshotTable table_;
};

std::string hexOf(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

py::dict describe(const SlotView& view) {
  py::dict slot;
  slot["slot"] = view.index;
  slot["state"] = "sealed";
  slot["step"] = view.step;
  slot["incarnation"] = hexOf(view.incarnation);
  slot["payload_bytes"] = view.payload_bytes;
  slot["object_bytes"] = view.object_bytes;
  slot["chunks"] = view.chunk_count;
  slot["chunk_bytes"] = view.chunk_bytes;
  slot["sealed_ns"] = view.sealed_ns;
  return slot;
}

py::dict listVault(int fd) {
  const VaultReader reader(fd);
  py::dict result;
  result["job"] = reader.identity().job;
  result["rank"] = reader.identity().rank;
  result["world"] = reader.identity().world;
  result["bytes"] = reader.bytes();
  py::list slots;
  for (const SlotView& view : reader.slots()) {
    py::dict slot = describe(view);
    const SnapshotTable table = reader.table(view);
    slot["regions"] = table.regions.size();
    slot["groups"] = table.groups.size();
    slot["protection"] = table.protection;
    slots.append(slot);
  }
  result["slots"] = slots;
  py::list raw;
  for (const RawSlot& one : reader.rawSlots()) {
    const char* names[] = {"empty", "writing", "sealed"};
    raw.append(
        py::make_tuple(names[static_cast<uint32_t>(one.state)], one.step, hexOf(one.incarnation)));
  }
  result["raw_slots"] = raw;
  return result;
}

py::dict verifyVault(int fd) {
  const VaultReader reader(fd);
  py::list slots;
  for (const SlotView& view : reader.slots()) {
    std::vector<ChunkFault> faults;
    {
      const py::gil_scoped_release release;
      faults = reader.verify(view);
    }
    py::dict slot = describe(view);
    slot["overwritten"] = !reader.stillSealed(view);
    py::list list;
    for (const ChunkFault& fault : faults) {
      py::dict entry;
      entry["payload_offset"] = fault.payload_offset;
      entry["expected"] = hexOf(fault.expected);
      entry["found"] = hexOf(fault.found);
      list.append(entry);
    }
    slot["faults"] = list;
    slots.append(slot);
  }
  py::dict result;
  result["job"] = reader.identity().job;
  result["rank"] = reader.identity().rank;
  result["slots"] = slots;
  return result;
}

py::tuple inventoryOf(int fd, int node) {
  std::vector<std::string> faults;
  std::string text;
  {
    const py::gil_scoped_release release;
    const VaultReader reader(fd);
    text = inventoryJson({{reader.identity().rank, node, summarizeVerified(reader, faults)}});
  }
  return py::make_tuple(text, faults);
}

py::dict agree(const std::vector<std::string>& inventories, int world) {
  const std::vector<VaultSummary> vaults = parseInventories(inventories);
  const Agreement agreement = agreeOnRestore(vaults, world);
  py::dict result;
  result["rejected"] = agreement.rejected;
  result["vaults"] = vaults.size();
  if (!agreement.plan) {
    result["step"] = py::none();
    return result;
  }
  const RestorePlan& plan = *agreement.plan;
  result["step"] = plan.step;
  result["incarnation"] = plan.incarnation;
  result["node_of_rank"] = plan.node_of_rank;
  result["donor"] = plan.donor;
  result["holders"] = plan.holders;
  // Slot of each rank's vault that holds the step.
  std::map<int, uint32_t> slot_of;
  for (const VaultSummary& vault : vaults) {
    for (const SlotSummary& slot : vault.slots) {
      if (slot.step == plan.step && slot.incarnation == plan.incarnation) {
        slot_of[vault.rank] = slot.slot;
      }
    }
  }
  result["slot_of_rank"] = slot_of;
  return result;
}

// Content hash of a region: equal on replicas. Seeds make 128 bits of two halves.
py::tuple contentHash(const py::object& handle) {
  at::Tensor tensor = unpack(handle);
  const py::gil_scoped_release release;
  if (tensor.is_cuda()) {  // waits for the stream; plans are rare
    tensor = tensor.detach().cpu();
  }
  const uint64_t low = hashBytes(tensor.const_data_ptr(), tensor.nbytes(), 1);
  const uint64_t high = hashBytes(tensor.const_data_ptr(), tensor.nbytes(), 2);
  const py::gil_scoped_acquire acquire;
  return py::make_tuple(low, high);
}

}  // namespace

void bindSnapshot(py::module_& module) {
  py::class_<Engine, std::shared_ptr<Engine>>(module, "SnapshotEngine")
      .def(py::init<std::shared_ptr<AgentClient>, const std::string&, int, int, uint32_t, uint32_t,
                    const std::string&, int, uint64_t, uint64_t,
                    const c10::intrusive_ptr<c10d::Store>&, int, uint32_t, bool, double, double,
                    uint64_t, const std::string&, uint32_t, double, uint32_t>(),
           py::arg("client"), py::arg("job"), py::arg("rank"), py::arg("world"), py::arg("slots"),
           py::arg("op_log_records"), py::arg("path"), py::arg("adopt_fd"), py::arg("incarnation"),
           py::arg("attempt"), py::arg("store"), py::arg("nodes"), py::arg("threads"),
           py::arg("verify_full"), py::arg("slot_wait_sec"), py::arg("alarm_sec"),
           py::arg("chunk_bytes"), py::arg("policy"), py::arg("every"), py::arg("overhead_percent"),
           py::arg("control_every"))
      .def("adopt", &Engine::adopt, py::arg("slot"), py::arg("step"), py::arg("incarnation"))
      .def("set_table", &Engine::setTable, py::arg("regions"), py::arg("groups"), py::arg("rank"),
           py::arg("world"), py::arg("protection"), py::arg("copies"))
      .def("capture", &Engine::capture, py::arg("step"), py::arg("tensors"), py::arg("objects"),
           py::arg("parts"), py::arg("writers"), py::arg("gated") = true)
      .def("leave_out", &Engine::leaveOut, py::arg("step"))
      .def("gate", &Engine::gate)
      .def("set_policy", &Engine::setPolicy, py::arg("policy"))
      .def("take_late_written", &Engine::takeLateWritten)
      .def_property_readonly("committed_step", &Engine::committedStep)
      .def("drain", &Engine::drain, py::arg("timeout_ms"))
      .def("begin_point", &Engine::beginPoint, py::arg("step"))
      .def("end_point", &Engine::endPoint)
      .def_property_readonly("cadence", &Engine::cadence)
      .def("set_restore_ns", &Engine::setRestoreNs)
      .def("stats", &Engine::stats)
      .def_property_readonly("fd", &Engine::fd);
  py::class_<SlotSource>(module, "SlotSource")
      .def(py::init<int, uint32_t, int64_t, uint64_t>(), py::arg("fd"), py::arg("slot"),
           py::arg("step"), py::arg("incarnation"))
      .def_property_readonly("objects", &SlotSource::objects)
      .def_property_readonly("regions", &SlotSource::regions)
      .def_property_readonly("groups", &SlotSource::groups)
      .def_property_readonly("pieces", &SlotSource::pieces)
      .def("copy_into", &SlotSource::copyInto, py::arg("moves"));
  module.def("list_vault", &listVault, py::arg("fd"));
  module.def("verify_vault", &verifyVault, py::arg("fd"));
  module.def("inventory_of", &inventoryOf, py::arg("fd"), py::arg("node"));
  module.def("agree", &agree, py::arg("inventories"), py::arg("world"));
  module.def("content_hash", &contentHash, py::arg("tensor"));
  module.def(
      "cuda_absent", [] { return cudaApi().why; },
      "Why snapshots cannot copy CUDA tensors; empty if they can.");
  module.def(
      "dtype_name",
      [](const py::object& handle) { return c10::toString(unpack(handle).scalar_type()); },
      py::arg("tensor"), "Name of the element type as the tensor table has it.");
  module.def(
      "is_dense", [](const py::object& handle) { return dense(unpack(handle)); },
      py::arg("tensor"));
}

}  // namespace reft
