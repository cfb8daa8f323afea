#include "python/bindings/evidence_exchange.h"

#include "c10d_backend/store/evidence_exchange.h"

namespace py = pybind11;

namespace reft {

namespace {

// Between the exchange and the rank's connection to its agent.
class Carrier {
 public:
  Carrier(std::shared_ptr<AgentClient> client, const c10::intrusive_ptr<c10d::Store>& store,
          std::shared_ptr<const ValueSeal> seal, int node, int nodes, uint64_t incarnation)
      : client_(std::move(client)),
        exchange_(
            store, std::move(seal), {node, nodes, incarnation},
            // Weak: an abandoned thread must not keep this rank connected.
            [client = std::weak_ptr(client_)](wire::Type type, std::string_view payload) {
              if (const auto connected = client.lock()) {
                connected->send(type, payload);
              }
            },
            EvidenceExchange::paceOf(nodes)) {
    for (const auto type : {wire::Type::kGather, wire::Type::kEvidence}) {
      client_->handle(type, [type, receive = exchange_.receiver()](const wire::Frame& frame) {
        receive(type, frame.payload);
      });
    }
  }
  ~Carrier() {
    for (const auto type : {wire::Type::kGather, wire::Type::kEvidence}) {
      client_->handle(type, [](const wire::Frame&) {});
    }
  }
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

 private:
  std::shared_ptr<AgentClient> client_;
  EvidenceExchange exchange_;
};

}  // namespace

void bindEvidenceExchange(py::module_& module) {
  // The destructor waits for a thread; nobody may wait for it with the GIL held.
  struct Released {
    void operator()(Carrier* carrier) const {
      const py::gil_scoped_release release;
      delete carrier;
    }
  };
  py::class_<Carrier, std::unique_ptr<Carrier, Released>>(
      module, "EvidenceExchange",
      "Carries evidence of hangs between the agents of a job's nodes, until it is dropped.")
      .def(py::init([](std::shared_ptr<AgentClient> client,
                       const c10::intrusive_ptr<c10d::Store>& store,
                       std::shared_ptr<ValueSeal> seal, int node, int nodes, uint64_t incarnation) {
             const py::gil_scoped_release release;
             return std::unique_ptr<Carrier, Released>(
                 new Carrier(std::move(client), store, std::move(seal), node, nodes, incarnation));
           }),
           py::arg("client"), py::arg("store"), py::arg("seal"), py::arg("node"), py::arg("nodes"),
           py::arg("incarnation"));
  module.attr("evidence_carriers") = wire::kEvidenceCarriers;
}

}  // namespace reft
