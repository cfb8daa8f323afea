#include "python/bindings/backend.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "c10d_backend/backend.h"
#include "c10d_backend/call_site.h"
#include "c10d_backend/gil.h"
#include "python/bindings/base.h"

namespace py = pybind11;

namespace reft {
namespace {

bool interpreterRuns() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

void releaseGil(void (*body)(void*), void* argument) noexcept {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    body(argument);
    return;
  }
  PyThreadState* state = PyEval_SaveThread();
  body(argument);
  PyEval_RestoreThread(state);
}

// A Python callable that C++ may drop in any thread, at any time.
std::shared_ptr<py::object> shared(py::object callable) {
  return {new py::object(std::move(callable)), [](py::object* object) {
            if (!interpreterRuns()) {
              object->release();  // leaked: nobody can free it any more
            } else {
              const py::gil_scoped_acquire acquire;
              *object = py::object();
            }
            delete object;
          }};
}

BackendParts::CpuFactory cpuFactory(const py::object& callable) {
  if (callable.is_none()) {
    return nullptr;
  }
  return [held = shared(callable)](const StorePtr& store, int rank, int size,
                                   std::chrono::milliseconds timeout, const std::string& group) {
    const py::gil_scoped_acquire acquire;
    return (*held)(store, rank, size, timeout, group).cast<BackendPtr>();
  };
}

// The inner backends as Python sees them, NCCL first.
std::vector<py::object> inners(const ReftBackend& self) {
  std::vector<py::object> result;
  for (const BackendPtr& inner : {self.cuda(), self.cpu()}) {
    if (inner) {
      result.push_back(py::cast(inner));
    }
  }
  return result;
}

bool has(const py::object& object, const char* name) {
  return py::hasattr(object, name);
}

// Calls a method of the inner Python classes (they differ) where it exists.
void callInners(const ReftBackend& self, const char* name, const py::object& argument) {
  for (const py::object& inner : inners(self)) {
    if (has(inner, name)) {
      inner.attr(name)(argument);
    }
  }
}

py::object innerAttribute(const ReftBackend& self, const std::string& name) {
  // Python's own protocols (copy, pickle) must not reach the inner object.
  if (name.rfind("__", 0) != 0) {
    for (const py::object& inner : inners(self)) {
      if (has(inner, name.c_str())) {
        return inner.attr(name.c_str());
      }
    }
  }
  throw py::attribute_error("'ReftBackend' object has no attribute '" + name + "'");
}

void bindBackendClass(py::module_& module) {
  const py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<ReftBackend, c10::intrusive_ptr<ReftBackend>>(
      module, "ReftBackend", base,
      "The backend \"reft\": gloo and NCCL behind one object, with an op log.")
      .def(py::init([](const BackendPtr& cpu, const BackendPtr& cuda, const StorePtr& store,
                       const std::string& store_prefix, const std::string& group, int rank,
                       int size, const py::object& make_cpu) {
             ReftBackend::Parts parts;
             parts.cpu = cpu;
             parts.cuda = cuda;
             parts.store = store;
             parts.store_prefix = store_prefix;
             parts.group_name = group;
             parts.make_cpu = cpuFactory(make_cpu);
             return c10::make_intrusive<ReftBackend>(std::move(parts), rank, size);
           }),
           py::arg("cpu").none(true), py::arg("cuda").none(true), py::arg("store").none(true),
           py::arg("store_prefix"), py::arg("group"), py::arg("rank"), py::arg("size"),
           py::arg("make_cpu") = py::none())
      .def(
          "inner",
          [](const ReftBackend& self, const std::string& device) -> BackendPtr {
            return device.rfind("cpu", 0) == 0 ? self.cpu() : self.cuda();
          },
          py::arg("device"), "The inner backend for 'cpu' or 'cuda', None if there is none.")
      .def_property_readonly("group_index", &ReftBackend::groupIndex,
                             "Of this group in the op log.")
      .def_property_readonly("closed", &ReftBackend::closed)
      .def("comm_split_count", &ReftBackend::splitCount)
      // new_group() calls it on ranks outside the group if the parent is eagerly connected. The
      // members make a fresh communicator from the store, so there is nothing that others would
      // have to join.
      .def(
          "perform_nocolor_split", [](const ReftBackend&, const py::object&) {}, py::arg("device"))
      .def(
          "_set_default_timeout",
          [](ReftBackend& self, std::chrono::milliseconds timeout) {
            callInners(self, "_set_default_timeout", py::cast(timeout));
            const py::gil_scoped_release release;
            self.setTimeout(timeout);
          },
          py::arg("timeout"))
      .def(
          "_add_ephemeral_timeout",
          [](const ReftBackend& self, const py::object& timeout) {
            callInners(self, "_add_ephemeral_timeout", timeout);
          },
          py::arg("timeout"))
      .def(
          "_shutdown", [](ReftBackend& self) { self.shutdown(); },
          py::call_guard<py::gil_scoped_release>())
      .def("_is_initialized",
           [](const ReftBackend& self) {
             for (const py::object& inner : inners(self)) {
               if (has(inner, "_is_initialized")) {
                 return inner.attr("_is_initialized")().cast<bool>();
               }
             }
             return true;
           })
      // Register for memory pools, group calls, options: whatever else the inner classes have.
      .def("__getattr__", &innerAttribute);
}

}  // namespace

py::dict entryDict(const OpEntry& entry) {
  py::dict row;
  row["ticket"] = entry.ticket;
  row["op"] = opKindName(entry.kind);
  row["group"] = entry.group;
  row["seq"] = entry.seq;
  row["peer"] = entry.peer;
  row["tag"] = entry.tag;
  row["bytes"] = entry.bytes;
  row["dtype"] = entry.dtype;
  row["reduce_op"] = entry.reduce_op;
  row["signature"] = entry.signature;
  row["call_site"] = entry.call_site;
  row["failed"] = entry.failed;
  row["begin_ns"] = entry.begin_ns;
  row["enqueued_ns"] = entry.enqueued_ns;
  row["wait_begin_ns"] = entry.wait_begin_ns;
  row["wait_end_ns"] = entry.wait_end_ns;
  row["done_ns"] = entry.done_ns;
  return row;
}

void bindBackend(py::module_& module) {
  setGilReleaser(&releaseGil);
  bindBackendClass(module);

  py::class_<OpLog>(module, "OpLog",
                    "Records of this process's collectives, newest overwriting oldest.")
      .def(
          "tail",
          [](const OpLog& self, size_t count) {
            std::vector<OpEntry> entries;
            {
              const py::gil_scoped_release release;
              entries = OpLogReader(self.area(), self.areaBytes()).tail(count);
            }
            py::list rows;
            for (const OpEntry& entry : entries) {
              rows.append(entryDict(entry));
            }
            return rows;
          },
          py::arg("count") = 100,
          "The newest records, oldest first; times are CLOCK_MONOTONIC nanoseconds, 0 = not yet.")
      .def(
          "groups",
          [](const OpLog& self) {
            py::list rows;
            for (const OpGroup& group : OpLogReader(self.area(), self.areaBytes()).groups()) {
              rows.append(py::make_tuple(textOf(group.name), group.rank, group.size));
            }
            return rows;
          },
          "(name, own rank, size) by group index.")
      .def(
          "call_sites",
          [](const OpLog& self) {
            py::dict sites;
            for (const auto& [id, text] : OpLogReader(self.area(), self.areaBytes()).callSites()) {
              sites[py::int_(id)] = textOf(text);
            }
            return sites;
          },
          "Place in the user's code by call-site id: 'train.py:88 load_batch'.");
  module.def("process_op_log", &processOpLog, py::return_value_policy::reference);
  module.def("install_call_sites", &installCallSites, py::arg("skip"));
}

}  // namespace reft
