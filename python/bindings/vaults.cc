#include "python/bindings/vaults.h"

#include <fcntl.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "intercept/base/unique_fd.h"
#include "snapshot/restore/slot_source.h"
#include "snapshot/vault/place.h"
#include "snapshot/vault/reader.h"

namespace py = pybind11;

namespace reft {

namespace {

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
  result["step_ns"] = reader.stats().step_ns.load(std::memory_order_relaxed);
  result["recomputing_step"] = reader.stats().recomputing_step.load(std::memory_order_relaxed);
  result["restoring"] =
      py::make_tuple(reader.stats().restoring_step.load(std::memory_order_relaxed),
                     reader.stats().restoring_way.load(std::memory_order_relaxed),
                     reader.stats().restoring_tries.load(std::memory_order_relaxed));
  result["oom_mark"] = reader.stats().oom_mark.load(std::memory_order_relaxed);
  result["given_up"] = reader.stats().given_up.load(std::memory_order_relaxed) != 0;
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
    slot["overwritten"] = !reader.isUnchanged(view);
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

// The regions of a sealed slot, checked: (name, dtype, shape, bytes, [(begin, contents)]).
py::list readSlot(int fd, uint32_t slot, int64_t step, uint64_t incarnation) {
  const SlotSource source(fd, slot, step, incarnation);
  const SnapshotTable& table = source.table();
  std::vector<std::string> contents(table.pieces.size());
  {
    const py::gil_scoped_release release;
    std::vector<SlotSource::Copy> copies;
    for (size_t i = 0; i < table.pieces.size(); ++i) {
      const Piece& piece = table.pieces[i];
      contents[i].resize(piece.end - piece.begin);
      copies.push_back({piece.payload_offset, contents[i].size(),
                        reinterpret_cast<std::byte*>(contents[i].data())});
    }
    source.copy(std::move(copies));
  }
  std::vector<py::list> pieces(table.regions.size());
  for (size_t i = 0; i < table.pieces.size(); ++i) {
    pieces[table.pieces[i].region].append(
        py::make_tuple(table.pieces[i].begin, py::bytes(contents[i])));
  }
  py::list regions;
  for (size_t i = 0; i < table.regions.size(); ++i) {
    const RegionInfo& region = table.regions[i];
    regions.append(
        py::make_tuple(region.name, region.dtype, region.shape, region.bytes, pieces[i]));
  }
  return regions;
}

std::string placeProblem(const std::string& path) {
  const UniqueFd place(::open(path.c_str(), O_PATH | O_CLOEXEC));
  return vaultPlaceProblem(place.get());
}

// The directory may not exist yet: then it will be where its parent is.
bool willBeInMemory(std::string path) {
  for (;;) {
    const UniqueFd place(::open(path.c_str(), O_PATH | O_CLOEXEC));
    const size_t slash = path.find_last_not_of('/') == path.npos
                             ? path.npos
                             : path.rfind('/', path.find_last_not_of('/'));
    if (place || slash == path.npos) {
      return isInMemory(place.get());
    }
    path.resize(std::max<size_t>(slash, 1));
  }
}

}  // namespace

void bindVaults(py::module_& module) {
  module.def("list_vault", &listVault, py::arg("fd"));
  module.def("verify_vault", &verifyVault, py::arg("fd"));
  module.def(
      "vault_place_problem", &placeProblem, py::arg("path"),
      "Why a vault cannot be in the directory `path`: 'is on btrfs, where …'; '' if it can.");
  module.def(
      "is_in_memory", &willBeInMemory, py::arg("path"),
      "Whether files in the directory `path`, which may not exist yet, are in memory (tmpfs).");
  module.def("read_slot", &readSlot, py::arg("fd"), py::arg("slot"), py::arg("step"),
             py::arg("incarnation"),
             "(name, dtype, shape, bytes, [(begin, contents)]) of each region of a sealed slot.");
}

}  // namespace reft
