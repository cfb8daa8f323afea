// Binding of what carries evidence of hangs between nodes, `_C.EvidenceExchange`.
//
// Threads: with the GIL. Errors: those of the store, as it is cloned.
#pragma once

#include "python/bindings/base.h"

namespace reft {

void bindEvidenceExchange(pybind11::module_& module);

}  // namespace reft
