// Binds readers of vaults: what they hold, whether it is intact. Requires the GIL; long calls
// release it. Errors: as intercept/base/error.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindVaults(pybind11::module_& module);

}  // namespace reft
