// What a continuation needs to know of a tensor, in one call: each attribute asked for from Python
// costs as much as all of this.
//
// Threads: under the GIL. Errors: TypeError for what is no tensor, InvalidArgument for one whose
// storage was given back.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindTensors(pybind11::module_& module);

}  // namespace reft
