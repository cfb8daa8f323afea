#include "python/bindings/value_seal.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "intercept/base/error.h"
#include "intercept/link/value_seal.h"

namespace py = pybind11;

namespace reft {

namespace {

std::string_view viewOf(const py::bytes& bytes) {
  return static_cast<std::string_view>(bytes);
}

// The kinds that Python writes.
ValueKind kindNamed(const std::string& name) {
  constexpr std::pair<std::string_view, ValueKind> kKinds[] = {
      {"round", ValueKind::kRound},       {"agent", ValueKind::kAgent},
      {"table", ValueKind::kTable},       {"objects", ValueKind::kObjects},
      {"replicas", ValueKind::kReplicas}, {"name", ValueKind::kName},
  };
  for (const auto& [known, kind] : kKinds) {
    if (name == known) {
      return kind;
    }
  }
  throw InvalidArgument("kind of a value", name, "round|agent|table|objects|replicas|name");
}

py::object opened(const ValueSeal& self, const std::string& kind, const std::string& key,
                  std::optional<uint32_t> publisher, const py::bytes& value, size_t longest) {
  const auto found = self.open(kindNamed(kind), key, publisher.value_or(ValueSeal::kAnyRank),
                               viewOf(value), longest);
  if (!found) {
    return py::none();
  }
  return py::make_tuple(found->publisher, py::bytes(found->payload));
}

}  // namespace

void bindValueSeal(py::module_& module) {
  py::class_<ValueSeal, std::shared_ptr<ValueSeal>>(
      module, "ValueSeal", "Seals values for the job's store, and opens those of this attempt.")
      .def(py::init([](const py::bytes& secret, const std::string& attempt, int world) {
             return std::make_shared<ValueSeal>(viewOf(secret), attempt, world);
           }),
           py::arg("secret"), py::arg("attempt"), py::arg("world"))
      .def(
          "seal",
          [](const ValueSeal& self, const std::string& kind, const std::string& key,
             uint32_t publisher, const py::bytes& payload) {
            return py::bytes(self.seal(kindNamed(kind), key, publisher, viewOf(payload)));
          },
          py::arg("kind"), py::arg("key"), py::arg("publisher"), py::arg("payload"))
      .def("open", &opened, py::arg("kind"), py::arg("key"), py::arg("publisher"), py::arg("value"),
           py::arg("longest") = SIZE_MAX,
           "(publisher, payload) of a value that was read from `key`; None if no rank of this "
           "attempt has sealed it there. A publisher of None allows each.")
      .def_static("refused", &ValueSeal::refused, "How many values this process has refused.");
}

}  // namespace reft
