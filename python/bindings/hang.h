// Binds hang_detect/: answers to the agent's stack requests, and stack dumps for tests and tools.
// Requires the GIL. Errors: as intercept/base/error.h.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindHang(pybind11::module_& module);

}  // namespace reft
