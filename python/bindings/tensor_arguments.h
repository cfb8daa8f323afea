// Tensors that Python passes. Requires the GIL. Errors: InvalidArgument for what is not a tensor.
#pragma once

#include <string>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "intercept/base/error.h"

namespace reft {

inline at::Tensor tensorOf(pybind11::handle handle) {
  if (!THPVariable_Check(handle.ptr())) {
    throw InvalidArgument("region", std::string(pybind11::str(pybind11::type::handle_of(handle))),
                          "a tensor");
  }
  return THPVariable_Unpack(handle.ptr());
}

}  // namespace reft
