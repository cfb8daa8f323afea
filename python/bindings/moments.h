// Advances what Adam and SGD keep of parameters (snapshot/protect/moments.h), for tensors.
//
// Threads: under the GIL, which is given back meanwhile; torch's threads share the work. Errors:
// InvalidArgument for tensors that do not lie alike.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindMoments(pybind11::module_& module);

}  // namespace reft
