#include "python/bindings/snapshot.h"

#include <fcntl.h>
#include <pybind11/stl.h>
#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <random>

#include "intercept/base/error.h"
#include "intercept/driver/cuda_api.h"
#include "intercept/link/value_seal.h"
#include "python/bindings/tensor_arguments.h"
#include "python/rank/rank.h"
#include "snapshot/device/device_xor.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/live_reader.h"

namespace py = pybind11;

namespace reft {

namespace {

// A pending call of the interpreter: runs on the main thread, between two bytecodes.
int checkSnapshot(void* /*unused*/) {
  if (Rank* rank = Rank::current()) {
    rank->check();
  }
  return 0;
}

const char* nameOf(CaptureResult result) {
  switch (result) {
    case CaptureResult::kTaken: return "taken";
    case CaptureResult::kNoSlot: return "no_slot";
    case CaptureResult::kNoTable: return "no_table";
    case CaptureResult::kUnderWay: return "under_way";
    case CaptureResult::kFailed: return "failed";
  }
  return "failed";
}

std::shared_ptr<Rank> makeRank(std::shared_ptr<AgentClient> client, const std::string& job,
                               int rank, int world, int node, int nodes, std::vector<int> domain_of,
                               uint64_t attempt, uint64_t incarnation, uint32_t overhead_percent,
                               const c10::intrusive_ptr<c10d::Store>& store,
                               std::shared_ptr<ValueSeal> seal, const std::string& path,
                               int adopt_fd, const RestorePlan* plan) {
  Rank::Start start;
  start.identity = {job, rank, world, nodes, attempt, incarnation};
  start.options = RankOptions::from(Env::parse());
  start.options.overhead_percent = overhead_percent;
  start.client = std::move(client);
  start.node = node;
  start.domain_of = std::move(domain_of);
  start.store = store;
  start.seal = std::move(seal);
  start.vault_path = path;
  if (adopt_fd >= 0) {
    start.adopted = UniqueFd(::fcntl(adopt_fd, F_DUPFD_CLOEXEC, 3));
  }
  start.plan = plan;
  start.ask_check = [] { return Py_AddPendingCall(&checkSnapshot, nullptr) == 0; };
  start.hold_still = [](const std::function<void()>& work) {
    const py::gil_scoped_acquire acquire;
    work();
  };
  start.let_go = [](const std::function<void()>& work) {
    std::optional<py::gil_scoped_release> released;
    if (PyGILState_Check() != 0) {
      released.emplace();
    }
    work();
  };
  return std::make_shared<Rank>(std::move(start));
}

void askRoom(Rank& self, py::function room) {
  // Kept for good: a function of a module, and the vault may end without the GIL.
  const py::handle kept = room.release();
  self.vault().askRoom([kept](uint64_t bytes) {
    const py::gil_scoped_acquire acquire;
    try {
      return kept(bytes).cast<bool>();
    } catch (const py::error_already_set&) {
      return true;  // nothing is known against it
    }
  });
}

using SplitRow = std::tuple<std::string, std::string, uint64_t, std::vector<int64_t>>;

void setTable(Rank& self,
              const std::vector<std::tuple<std::string, py::object, int32_t, bool, bool>>& rows,
              const std::vector<std::pair<std::string, std::vector<int>>>& groups, bool plan_anew,
              const std::vector<SplitRow>& splits) {
  std::vector<Rank::Region> regions;
  for (const auto& [name, handle, group, early, replaceable] : rows) {
    regions.push_back({name, tensorOf(handle), group, early, replaceable});
  }
  std::vector<GroupInfo> infos;
  for (const auto& [id, ranks] : groups) {
    infos.push_back({id, ranks});
  }
  std::vector<SplitTensor> split_infos;
  for (const auto& [name, dtype, item_bytes, shape] : splits) {
    split_infos.push_back({name, dtype, shape, rowBytes(shape, item_bytes)});
  }
  const py::gil_scoped_release release;
  self.setTable(regions, std::move(infos), std::move(split_infos), plan_anew);
}

const char* capture(Rank& self, int64_t step, const py::list& tensors, const py::bytes& objects,
                    const std::vector<std::pair<py::object, uint64_t>>& parts,
                    const std::vector<std::pair<int, uint64_t>>& writers, bool gated) {
  Rank::Point point;
  point.step = step;
  point.objects = objects;
  point.gated = gated;
  for (const py::handle tensor : tensors) {
    point.tensors.push_back(tensorOf(tensor));
  }
  for (const auto& [handle, offset] : parts) {
    point.parts.push_back({tensorOf(handle), offset});
  }
  for (const auto& [device, handle] : writers) {
    point.writers.push_back({device, reinterpret_cast<cuda::Stream>(handle)});
  }
  CaptureResult result = CaptureResult::kFailed;
  {
    const py::gil_scoped_release release;
    result = self.capture(point);
  }
  self.freeReplaced();
  return nameOf(result);
}

int64_t gate(Rank& self) {
  int64_t waited = 0;
  {
    const py::gil_scoped_release release;
    waited = self.gate();
  }
  self.freeCopied();
  return waited;
}

std::tuple<int64_t, int64_t, int64_t> cadence(const Rank& self) {
  const RankStats& stats = self.vault().stats();
  const auto read = [](const std::atomic<uint64_t>& value) {
    return static_cast<int64_t>(value.load());
  };
  return {read(stats.every), read(stats.overhead_ppm), read(stats.overhead_noise_ppm)};
}

// Memory, or disk, that the vault takes: its file has holes where slots were laid out anew.
uint64_t bytesTaken(const Vault& vault) {
  struct stat info {};
  constexpr uint64_t kBlockBytes = 512;
  return ::fstat(vault.fd(), &info) == 0 ? static_cast<uint64_t>(info.st_blocks) * kBlockBytes
                                         : vault.bytes();
}

py::dict stats(const Rank& self) {
  py::dict result;
  const RankStats& stats = self.vault().stats();
#define REFT_STATS_ITEM(name) result[#name] = static_cast<int64_t>(stats.name.load());
  REFT_RANK_STATS(REFT_STATS_ITEM)
#undef REFT_STATS_ITEM
  result["note"] = std::string(stats.note, ::strnlen(stats.note, sizeof(stats.note)));
  result["vault_bytes"] = bytesTaken(self.vault());
  result["policy"] = placementPolicyName(self.engine().policy());
  return result;
}

// Content hash of a region: equal on replicas. Seeds make 128 bits of two halves.
py::tuple contentHash(const py::object& handle) {
  at::Tensor tensor = tensorOf(handle);
  uint64_t low = 0, high = 0;
  {
    const py::gil_scoped_release release;
    if (tensor.is_cuda()) {  // waits for the stream; plans are rare
      tensor = tensor.detach().cpu();
    }
    const auto* from =
        fitsStorage(tensor) ? static_cast<const std::byte*>(tensor.const_data_ptr()) : nullptr;
    LiveReader& reader = LiveReader::ofThread();
    for (uint64_t at = 0; at < tensor.nbytes();) {
      const uint64_t part = std::min<uint64_t>(tensor.nbytes() - at, LiveReader::kMostBytes);
      const std::byte* const copy = from == nullptr ? nullptr : reader.read(from + at, part);
      if (copy == nullptr) {  // its memory has gone: equal to nothing
        low = std::random_device()();
        high = std::random_device()();
        break;
      }
      low = hashBytes(copy, part, low + 1);
      high = hashBytes(copy, part, high + 2);
      at += part;
    }
  }
  return py::make_tuple(low, high);
}

void bindRank(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Rank, std::shared_ptr<Rank>>(module, "Rank")
      .def(py::init(&makeRank), py::kw_only(), py::arg("client"), py::arg("job"), py::arg("rank"),
           py::arg("world"), py::arg("node"), py::arg("nodes"), py::arg("domain_of"),
           py::arg("attempt"), py::arg("incarnation"), py::arg("overhead_percent"),
           py::arg("store"), py::arg("seal"), py::arg("path"), py::arg("adopt_fd") = -1,
           py::arg("plan") = nullptr)
      .def("ask_room", &askRoom, py::arg("room"),
           "room: whether the vault may take so many bytes more; asked before each part of a slot.")
      .def("set_table", &setTable, py::arg("regions"), py::arg("groups"),
           py::arg("plan_anew") = false, py::arg("splits") = std::vector<SplitRow>(),
           "regions: (name, tensor, group, early, replaceable); groups: (id, ranks); plan_anew: "
           "votes ask all ranks to plan; splits: (name, dtype, bytes of an item, shape of all "
           "ranks' parts together) of each tensor whose rows the ranks have in turn.")
      .def_property_readonly("plan_round",
                             [](const Rank& self) {
                               const auto round = self.engine().planRound();
                               return std::make_pair(round.step, round.parted);
                             })
      .def(
          "pass_over",
          [](Rank& self, int64_t step, const std::string& why, bool plan_anew) {
            self.engine().passOver(step, why, plan_anew);
          },
          py::arg("step"), py::arg("why"), py::arg("plan_anew"), unlocked)
      .def("capture", &capture, py::arg("step"), py::arg("tensors"), py::arg("objects"),
           py::arg("parts"), py::arg("writers"), py::arg("gated") = true,
           "parts: (contiguous tensor on a device, where its contents belong in the objects); "
           "writers: (device, stream) that may write the tensors.")
      .def(
          "protect", [](Rank& self, const std::string& setting) { self.protect(setting); },
          py::arg("setting"), "From the next table on; as REFT_SNAPSHOT_PROTECTION.")
      .def_property_readonly(
          "exceeds_at_longest", [](const Rank& self) { return self.engine().exceedsAtLongest(); },
          "Whether snapshots cost more than the limit on the overhead at the longest interval.")
      .def("gate", &gate)
      .def(
          "leave_out", [](Rank& self, int64_t step) { self.engine().leaveOut(step); },
          py::arg("step"), unlocked)
      .def(
          "set_policy",
          [](Rank& self, const std::string& policy) {
            self.engine().setPolicy(policyNamed(policy));
          },
          py::arg("policy"))
      .def(
          "take_late_written", [](Rank& self) { return self.engine().takeLateWritten(); }, unlocked)
      .def_property_readonly("committed_step",
                             [](const Rank& self) { return self.engine().committedStep(); })
      .def(
          "drain",
          [](Rank& self, int64_t timeout_ms) {
            return self.engine().drain(std::chrono::milliseconds(timeout_ms));
          },
          py::arg("timeout_ms"), unlocked)
      .def(
          "begin_point",
          [](Rank& self, int64_t step) { return self.engine().beginPoint(step, self.streams()); },
          py::arg("step"), unlocked)
      .def(
          "end_point", [](Rank& self) { self.engine().endPoint(); }, unlocked)
      .def_property_readonly("cadence", &cadence)
      .def_property_readonly("vault_lost",
                             [](const Rank& self) { return self.vault().lostPages(); })
      .def(
          "set_restored",
          [](Rank& self, uint64_t nanoseconds, uint64_t memory, uint64_t storage,
             uint64_t received) {
            RankStats& stats = self.vault().stats();
            stats.restored_memory_bytes.store(memory);
            stats.restored_storage_bytes.store(storage);
            stats.restored_received_bytes.store(received);
            stats.restore_ns.store(nanoseconds);
          },
          py::arg("nanoseconds"), py::arg("memory_bytes"), py::arg("storage_bytes"),
          py::arg("received_bytes"), "How long the resume took; where its bytes came from.")
      .def(
          "set_recomputing",
          [](Rank& self, uint64_t step) { self.vault().stats().recomputing_step.store(step); },
          py::arg("step"), "A rank that dies with a step here died while it computed it again.")
      .def(
          "set_resume_verdict",
          [](Rank& self, uint64_t verdict) { self.vault().stats().resume_verdict.store(verdict); },
          py::arg("verdict"))
      .def(
          "set_restoring",
          [](Rank& self, uint64_t step, uint64_t way, uint64_t tries) {
            RankStats& stats = self.vault().stats();
            stats.restoring_way.store(way);
            stats.restoring_tries.store(tries);
            stats.restoring_step.store(step);
          },
          py::arg("step"), py::arg("way"), py::arg("tries"), "For the next attempt.")
      .def(
          "set_memory_marks",
          [](Rank& self, uint64_t oom_mark, bool given_up) {
            self.vault().stats().oom_mark.store(oom_mark);
            self.vault().stats().given_up.store(given_up ? 1 : 0);
          },
          py::arg("oom_mark"), py::arg("given_up"), "For the next attempt.")
      .def(
          "give_back",
          [](Rank& self, bool everything) { return self.engine().giveBack(everything); },
          py::arg("everything"), unlocked,
          "Ends snapshots for good; returns the bytes of memory that this freed.")
      .def("stats", &stats)
      .def_property_readonly("fd", [](const Rank& self) { return self.vault().fd(); });
}

}  // namespace

void bindSnapshot(py::module_& module) {
  bindRank(module);
  module.def("content_hash", &contentHash, py::arg("tensor"));
  module.def(
      "cuda_absent", [] { return cudaApi().why; },
      "Why snapshots cannot copy CUDA tensors; empty if they can.");
  module.def(
      "dtype_name", [](const py::object& handle) { return dtypeName(tensorOf(handle)); },
      py::arg("tensor"), "Name of the element type as the tensor table has it.");
  module.def(
      "is_dense", [](const py::object& handle) { return isDense(tensorOf(handle)); },
      py::arg("tensor"));
  module.def(
      "stored_shards",
      [](const std::string& protection, const MemberNodes& nodes) {
        return Protection::named(protection).storedShards(nodes);
      },
      py::arg("protection"), py::arg("nodes"),
      "nodes: of the members of a group. Returns how many times the bytes of a shard a member "
      "stores at most.");
  module.def(
      "survivable_losses",
      [](const std::string& protection, uint32_t members) {
        return Protection::named(protection).losses(members);
      },
      py::arg("protection"), py::arg("members"),
      "How many lost nodes a group of so many survives if each member is on a node of its own.");
  module.def(
      "parity_sets",
      [](const std::string& protection, const MemberNodes& nodes) {
        return Protection::named(protection).paritySets(nodes);
      },
      py::arg("protection"), py::arg("nodes"),
      "nodes: of the members of a group. Returns the members of each set; none without parities.");
  module.def(
      "survives",
      [](const std::string& protection, const MemberNodes& nodes, const std::vector<bool>& lost) {
        if (lost.size() != nodes.size()) {
          throw InvalidArgument("lost", "of " + std::to_string(lost.size()) + " members",
                                "one for each of " + std::to_string(nodes.size()));
        }
        return Protection::named(protection).survives(nodes, lost);
      },
      py::arg("protection"), py::arg("nodes"), py::arg("lost"),
      "Whether every shard of a group comes back without the members that are lost.");
  module.def(
      "has_parities",
      [](const std::string& protection) { return Protection::named(protection).hasParities(); },
      py::arg("protection"), "Whether ranks store parities.");
  module.def(
      "parity_hindrance",
      [](const std::vector<int>& devices) { return DeviceXor::hindrance(cudaApi(), devices); },
      py::arg("devices"), py::call_guard<py::gil_scoped_release>(),
      "Why no parities can be made of state on these CUDA devices, -1 for the host; \"\": they "
      "can.\n"
      "Tries it on a device once in the life of the process.");
  module.def(
      "survival",
      [](const std::string& protection, const MemberNodes& nodes) {
        const Survival survival = Protection::named(protection).survival(nodes);
        return std::make_pair(survival.nodes, survival.weakest);
      },
      py::arg("protection"), py::arg("nodes"),
      "nodes: of the members of a group. Returns how many of them may be lost, whichever, and the "
      "members that one more loss would take together.");
}

}  // namespace reft
