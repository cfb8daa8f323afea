// Binds snapshot/restore/: inventories, the plan of a restart, and what carries it out. Requires
// the GIL; long calls release it. Errors: as intercept/base/error.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindRestore(pybind11::module_& module);

}  // namespace reft
