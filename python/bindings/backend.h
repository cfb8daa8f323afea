// Binds c10d_backend/: the class `ReftBackend`, the op log of the process, call sites.
// Requires the GIL. Errors: Python exceptions; torch's own for what the inner backends throw.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "intercept/record/op_log.h"

namespace reft {

void bindBackend(pybind11::module_& module);

// A record of an op log, its fields by their names.
pybind11::dict entryDict(const OpEntry& entry);

// Names places of the user's code for c10d_backend/call_site.h, by looking at the calling thread's
// frames. Files below one of `skip` (torch's folder, reft's, contextlib) are not the user's.
void installCallSites(std::vector<std::string> skip);

}  // namespace reft
