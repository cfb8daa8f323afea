// The inner order of Python's sets: in which order one is iterated, and what `pop` takes, depends
// on its history, not only on its members.
//
// Threads: under the GIL. Errors: TypeError for what is no set, ValueError for a layout that no set
// can have.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindSets(pybind11::module_& module);

}  // namespace reft
