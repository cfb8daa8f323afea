// Binds what a timeline is drawn from: `timeline_of(fd, ops, spans)`, the op log and the span log
// of one vault. Requires the GIL, and releases it while it reads. Errors: Corruption.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace reft {

void bindTimeline(pybind11::module_& module);

}  // namespace reft
