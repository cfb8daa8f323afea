#include "python/bindings/restore.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "c10d_backend/snapshot_transport.h"
#include "intercept/base/error.h"
#include "intercept/link/agent_client.h"
#include "python/bindings/tensor_arguments.h"
#include "python/rank/live_tensors.h"
#include "snapshot/restore/comparison.h"
#include "snapshot/restore/inventory.h"
#include "snapshot/restore/plan.h"
#include "snapshot/restore/restorer.h"
#include "snapshot/vault/reader.h"

namespace py = pybind11;

namespace reft {

namespace {

constexpr std::chrono::seconds kVaultWait{10};

using Rows = std::vector<std::pair<std::string, py::object>>;

std::vector<NamedTensor> tensorsOf(const Rows& rows) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, handle] : rows) {
    tensors.emplace_back(name, tensorOf(handle));
  }
  return tensors;
}

// A duplicate of a vault's descriptor, from the agent of this node. `copy`: of that of another
// node.
UniqueFd vaultOf(AgentClient& client, int rank, int world, bool copy) {
  const std::string wanted =
      nlohmann::json{{"rank", rank}, {"world", world}, {"copy", copy ? 1 : 0}}.dump();
  wire::Frame frame =
      client.request(wire::Type::kVaultGet, wanted, wire::Type::kVaultFd, kVaultWait);
  if (!frame.fd) {
    throw Unavailable("the agent has no vault of rank " + std::to_string(rank) + ": " +
                      frame.payload);
  }
  return std::move(frame.fd);
}

py::tuple inventoryOf(int fd, int node, bool is_copy) {
  std::vector<std::string> faults;
  std::string text;
  {
    const py::gil_scoped_release release;
    const VaultReader reader(fd);
    const RankStats& stats = reader.stats();
    const uint64_t writer = stats.incarnation.load();  // 0: it had only begun
    VaultSummary vault{reader.identity().rank,
                       node,
                       summarizeVerified(reader, faults),
                       writer == 0 ? VaultSummary::kUnknown : writer,
                       static_cast<int64_t>(stats.restored_step.load()),
                       is_copy,
                       reader.identity().world};
    const bool goes_on =
        stats.resumes_world.load() == static_cast<uint64_t>(vault.world) ||
        std::any_of(vault.slots.begin(), vault.slots.end(),
                    [writer](const SlotSummary& slot) { return slot.incarnation == writer; });
    vault.since = goes_on ? stats.started_at.load() : 0;
    text = inventoryJson({vault});
  }
  return py::make_tuple(text, faults);
}

std::string mergeInventories(const std::vector<std::string>& texts) {
  return inventoryJson(parseInventories(texts));
}

// The ranks of which an inventory has no vault, and how many ranks the job had: of those that left
// vaults, the last one, as planRestore() wants it. None if the inventory has no vault.
std::pair<std::vector<int>, int> ranksWithoutVault(const std::string& inventory, int world) {
  std::map<int, std::set<int>> found;  // by number of ranks
  std::tuple<uint64_t, bool, int> last{0, false, world};
  for (const VaultSummary& vault : parseInventories({inventory})) {
    found[vault.world].insert(vault.rank);
    last = std::max(last, {vault.since, vault.world == world, vault.world});
  }
  const int of = std::get<int>(last);
  std::vector<int> missing;
  for (int rank = 0; rank < of && found.contains(of); ++rank) {
    if (!found[of].contains(rank)) {
      missing.push_back(rank);
    }
  }
  return {missing, of};
}

// (plan or None, why newer steps were passed over, whether any vault was found).
py::tuple planOf(const std::string& inventory, std::vector<int> node_of, int64_t below) {
  RestoreDecision decision;
  bool found = false;
  {
    const py::gil_scoped_release release;
    const std::vector<VaultSummary> vaults = parseInventories({inventory});
    found = !vaults.empty();
    decision = planRestore(vaults, JobShape(std::move(node_of)), below);
  }
  return py::make_tuple(decision.plan ? py::cast(std::move(*decision.plan)) : py::none(),
                        decision.rejected, found);
}

std::shared_ptr<Restorer> makeRestorer(std::shared_ptr<AgentClient> client, const RestorePlan& plan,
                                       int rank) {
  return std::make_shared<Restorer>(
      plan, rank, [client = std::move(client), world = plan.savedBy()](int vault, bool copy) {
        return vaultOf(*client, vault, world, copy);
      });
}

py::list regionsOf(Restorer& self) {
  py::list result;
  const SnapshotTable& table = self.wanted();
  std::set<std::string_view> with_rows;
  for (const RegionInfo& region : table.regions) {
    with_rows.insert(region.name);
    result.append(py::make_tuple(region.name, region.dtype, region.shape, region.strides));
  }
  for (const SplitTensor& split : table.splits) {
    std::vector<int64_t> none = split.shape;
    none[0] = 0;
    if (!with_rows.contains(split.name)) {
      result.append(py::make_tuple(split.name, split.dtype, none, std::vector<int64_t>()));
    }
  }
  return result;
}

// Returns the bytes written. `backend` moves what crosses nodes.
uint64_t restore(Restorer& self, const Rows& rows,
                 const c10::intrusive_ptr<c10d::Backend>& backend) {
  const std::vector<NamedTensor> tensors = tensorsOf(rows);
  const py::gil_scoped_release release;
  std::unique_ptr<SnapshotTransport> transport;
  if (backend) {
    transport = std::make_unique<SnapshotTransport>(backend);
  }
  return self.restore(liveRegions(tensors), transport.get(),
                      [&](size_t region, uint64_t begin, std::span<const std::byte> bytes) {
                        uploadTo(tensors[region].second, begin, bytes);
                      });
}

// (bytes compared, bytes left out, [(region, first, sample_at, sample, certain)] of what differs).
py::tuple compareWith(const SlotSource& saved, const Rows& rows) {
  const std::vector<NamedTensor> tensors = tensorsOf(rows);
  Comparison found;
  {
    const py::gil_scoped_release release;
    found = compare(saved, liveRegions(tensors),
                    [&](size_t region, uint64_t begin, std::span<std::byte> into) {
                      downloadFrom(tensors[region].second, begin, into);
                    });
  }
  py::list differences;
  for (const PieceDifference& one : found.differences) {
    differences.append(
        py::make_tuple(one.region, one.first, one.sample_at, py::bytes(one.sample), one.certain));
  }
  return py::make_tuple(found.compared_bytes, found.left_out_bytes, differences);
}

}  // namespace

void bindRestore(py::module_& module) {
  module.def("inventory_of", &inventoryOf, py::arg("fd"), py::arg("node"),
             py::arg("is_copy") = false,
             "(inventory of one vault, its damages in words). Reads all of it.");
  module.def("ranks_without_vault", &ranksWithoutVault, py::arg("inventory"), py::arg("world"),
             "(ranks, ascending, of which an inventory has no vault: none if it has none at all; "
             "how many ranks the job of these vaults had, which is the one that ran last)");
  module.def(
      "rows_of",
      [](int64_t rows, int world, int rank) {
        const RowRange own = rowsOf(rows, world, rank);
        return std::make_pair(own.begin, own.end);
      },
      py::arg("rows"), py::arg("world"), py::arg("rank"),
      "The first row, and the one behind the last, that a rank has of a split tensor.");
  module.def("merge_inventories", &mergeInventories, py::arg("texts"));
  module.def("plan_restore", &planOf, py::arg("inventory"), py::arg("node_of"),
             py::arg("below") = INT64_MAX,
             "`node_of`: of each rank. (plan or None, why newer steps were passed over, whether "
             "any vault was found).");
  py::class_<RestorePlan>(module, "RestorePlan")
      .def_readonly("step", &RestorePlan::step)
      .def_readonly("incarnation", &RestorePlan::incarnation)
      .def_readonly("donor", &RestorePlan::donor)
      .def_readonly("replaced", &RestorePlan::replaced)
      .def_property_readonly("saved_by", &RestorePlan::savedBy, "How many ranks saved the step.")
      .def("owner", &RestorePlan::ownerFor, py::arg("rank"),
           "The rank whose small state and private regions a rank takes.")
      .def("is_near", &RestorePlan::isNear, py::arg("vault"), py::arg("rank"))
      .def("takes_own", &RestorePlan::takesOwn, py::arg("rank"),
           "Whether the rank goes on with the vault that it wrote.")
      .def("reader", &RestorePlan::readerOf, py::arg("vault"),
           "The rank that reads a vault for ranks of other nodes.");
  py::class_<SlotSource>(module, "UnfinishedStep")
      .def_property_readonly("step", &SlotSource::step)
      .def_property_readonly(
          "objects", [](const SlotSource& self) { return py::bytes(self.objects()); },
          "The small state; empty if the rank had not written all of it.")
      .def("compare", &compareWith, py::arg("tensors"),
           "As Restorer.compare; what was not copied is left out.");
  module.def("step_after", &SlotSource::after, py::arg("fd"), py::arg("step"),
             py::arg("incarnation"),
             "The first step after a committed one that the same incarnation has left in a vault, "
             "None if there is none that can be read.");
  py::class_<Restorer, std::shared_ptr<Restorer>>(module, "Restorer")
      .def(py::init(&makeRestorer), py::arg("client"), py::arg("plan"), py::arg("rank"))
      .def(
          "objects_of",
          [](Restorer& self, int vault) { return py::bytes(self.slot(vault).objects()); },
          py::arg("vault"))
      .def(
          "table_of", [](Restorer& self, int vault) { return self.slot(vault).table().toJson(); },
          py::arg("vault"))
      .def(
          "put_table",
          [](Restorer& self, const std::string& text) {
            self.putTable(SnapshotTable::fromJson(text));
          },
          py::arg("text"), "The table of the owner's vault, if that lies on another node.")
      .def_property_readonly(
          "regions", &regionsOf,
          "(name, dtype, shape, strides) of each saved tensor, as this rank is to have it; also "
          "of those whose rows other ranks have.")
      .def_property_readonly("splits", &Restorer::splits,
                             "Names of tensors whose rows another number of ranks had in turn.")
      .def_property_readonly("parted", &Restorer::parted,
                             "Names of tensors that some ranks of another number shared.")
      .def("deal_rows", &Restorer::dealRows, py::arg("parts"),
           "Says that rank r now has part r % parts of the rows of split tensors.")
      .def_property_readonly("other_parts", &Restorer::otherParts,
                             "(dtype, shape) of what the owner had of tensors of whose rows this "
                             "rank has others.")
      .def(
          "difference",
          [](Restorer& self, const Rows& rows) {
            return self.difference(liveRegions(tensorsOf(rows)));
          },
          py::arg("tensors"), "How (name, tensor) rows differ from the saved ones; '' if not.")
      .def(
          "compare",
          [](Restorer& self, int vault, const Rows& rows) {
            return compareWith(self.slot(vault), rows);
          },
          py::arg("vault"), py::arg("tensors"),
          "Compares (name, tensor) rows with what a rank's vault on this node stores: (bytes "
          "compared, bytes left out, [(name, first byte that differs, where the sample begins, "
          "sample of the saved bytes)]).")
      .def_property_readonly(
          "sources",
          [](const Restorer& self) {
            const Restorer::Sources& found = self.sources();
            return std::make_tuple(found.memory_bytes, found.storage_bytes, found.received_bytes);
          },
          "Bytes that restore() has read from vaults in memory and on storage, for this rank or "
          "another one, and that came from other nodes.")
      .def("restore", &restore, py::arg("tensors"), py::arg("backend"),
           "Writes all (name, tensor) rows; returns the bytes. Collective between nodes.");
}

}  // namespace reft
