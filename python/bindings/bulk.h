// Whether a large container still holds the very objects, or bytes, that it held: compared by
// identity, without a look at the objects, which may lie anywhere in memory.
//
// Threads: under the GIL. Errors: TypeError for another class of container, BufferError for memory
// that does not lie in one piece.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindBulk(pybind11::module_& module);

}  // namespace reft
