// Binds the seals of the store's values.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindValueSeal(pybind11::module_& module);

}  // namespace reft
