// Binds snapshot/: the engine of a rank, readers of vaults, the agreement. The only place where
// tensors become regions. Requires the GIL; long calls release it. Errors: as
// intercept/base/error.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindSnapshot(pybind11::module_& module);

}  // namespace reft
