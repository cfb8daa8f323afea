// Binds snapshot/simulate: `simulate(options)` runs one simulated job, JSON in and out.
// reft._cli.simulate has the names. Releases the GIL while it runs. Errors: InvalidArgument for
// what makes no sense, names that are not known included.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindSimulate(pybind11::module_& module);

}  // namespace reft
