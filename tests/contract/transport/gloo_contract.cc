// The contract of PeerTransport on a c10d backend that Python made: `run(case, backend, rank,
// world)`.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d_backend/snapshot_transport.h"
#include "tests/contract/transport/transport_contract.h"

namespace py = pybind11;

PYBIND11_MODULE(gloo_contract, module) {
  module.def("cases", [] {
    std::vector<std::string> names;
    for (const auto& [name, body] : reft::transport_contract::cases()) {
      names.push_back(name);
    }
    return names;
  });
  module.def("run", [](const std::string& wanted, const c10::intrusive_ptr<c10d::Backend>& backend,
                       int rank, int world) {
    const py::gil_scoped_release release;
    reft::SnapshotTransport transport(backend);
    for (const auto& [name, body] : reft::transport_contract::cases()) {
      if (name == wanted) {
        body(transport, rank, world);
      }
    }
  });
}
