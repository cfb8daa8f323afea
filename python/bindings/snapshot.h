// Binds python/rank/: the native parts of one rank, and what planning needs to know of tensors.
// Requires the GIL; long calls release it. Errors: as intercept/base/error.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindSnapshot(pybind11::module_& module);

}  // namespace reft
