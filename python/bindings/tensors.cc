#include "python/bindings/tensors.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>

#include "c10d_backend/pending_writes.h"
#include "intercept/base/error.h"
#include "python/rank/live_tensors.h"

namespace py = pybind11;

namespace reft {

namespace {

py::tuple tupleOf(c10::IntArrayRef numbers) {
  py::tuple result(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    result[i] = py::int_(numbers[i]);
  }
  return result;
}

// None unless it lies on the host in one piece. Else: its size in bytes, its shape, its bytes (None
// if they are more than `limit`), whether it is a leaf that takes part in autograd, address of its
// storage, offset and strides in items, and whether its items are the conjugates, and the
// negatives, of what lies there.
py::object hostMemory(py::handle handle, int64_t limit) {
  if (!THPVariable_Check(handle.ptr())) {
    throw py::type_error("a tensor is expected");
  }
  const at::Tensor& tensor = THPVariable_Unpack(handle.ptr());
  if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided || tensor.is_quantized() ||
      !tensor.has_storage() || !tensor.is_contiguous()) {
    return py::none();
  }
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (bytes > 0 && !fitsStorage(tensor)) {
    throw InvalidArgument("tensor", "without memory", "tensors that have theirs");
  }
  py::object contents = py::none();
  if (bytes <= limit) {
    contents = py::bytes(bytes == 0 ? "" : static_cast<const char*>(tensor.const_data_ptr()),
                         static_cast<size_t>(bytes));
  }
  const auto pointer = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return py::make_tuple(
      bytes, tupleOf(tensor.sizes()), contents, tensor.requires_grad() && tensor.is_leaf(), pointer,
      tensor.storage_offset(), tupleOf(tensor.strides()), tensor.is_conj(), tensor.is_neg());
}

// The name of an op that has been issued and may still write a tensor; None if there is none.
std::optional<std::string> writesStill(const py::object& handle) {
  if (!THPVariable_Check(handle.ptr())) {
    throw py::type_error("a tensor is expected");
  }
  const auto range = PendingWrites::Range::of(THPVariable_Unpack(handle.ptr()));
  const auto found = processPendingWrites().find({&range, 1});
  return found ? std::optional(std::string(opKindName(found->kind))) : std::nullopt;
}

}  // namespace

void bindTensors(py::module_& module) {
  module.def("writes_still", &writesStill, py::arg("tensor"));
  module.def("host_memory", &hostMemory, py::arg("tensor"), py::arg("limit"));
}

}  // namespace reft
