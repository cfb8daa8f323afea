// Python module `op_bench` of tests/bench/op_overhead.py: a backend that communicates with nobody,
// and loops without Python in them, which tell the mean time of `count` ops in nanoseconds.
#include <pybind11/stl.h>
#include <torch/extension.h>

#include <chrono>

#include "c10d_backend/backend.h"
#include "c10d_backend/call_site.h"
#include "tests/fakes/recording_backend.h"

namespace py = pybind11;

namespace reft {
namespace {

template <typename Body>
double nanosecondsEach(int64_t count, Body body) {
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) {
    body(i);
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
  return spent.count() / static_cast<double>(count);
}

double timeAllreduce(const BackendPtr& backend, const at::Tensor& tensor, int64_t count) {
  std::vector<at::Tensor> tensors{tensor};
  return nanosecondsEach(count, [&](int64_t) {
    if (const WorkPtr work = backend->allreduce(tensors)) {
      work->wait();
    }
  });
}

double timeOpLog(int64_t count) {
  OpLog log(nullptr, 16384);
  OpLog::Op op;
  op.kind = OpKind::kAllreduce;
  return nanosecondsEach(count, [&](int64_t i) {
    op.seq = static_cast<uint32_t>(i);
    const uint64_t ticket = log.begin(op);
    log.markEnqueued(ticket);
    log.markWaitBegin(ticket);
    log.markWaitEnd(ticket);
    log.markDone(ticket);
  });
}

double timeCallSite(int64_t count) {
  volatile uint32_t seen = 0;
  return nanosecondsEach(count, [&](int64_t) { seen = currentCallSite(); });
}

}  // namespace
}  // namespace reft

PYBIND11_MODULE(op_bench, module) {
  using namespace reft;
  const py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<RecordingBackend, c10::intrusive_ptr<RecordingBackend>>(module, "NoopBackend", base)
      .def(py::init([](int rank, int size) {
             return c10::make_intrusive<RecordingBackend>(rank, size, "noop");
           }),
           py::arg("rank") = 0, py::arg("size") = 1);
  const py::call_guard<py::gil_scoped_release> without_gil;
  module.def("time_allreduce", &timeAllreduce, py::arg("backend"), py::arg("tensor"),
             py::arg("count"), without_gil);
  module.def("time_op_log", &timeOpLog, py::arg("count"), without_gil);
  module.def("time_call_site", &timeCallSite, py::arg("count"), without_gil);
}
