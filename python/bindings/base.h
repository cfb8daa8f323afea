// Binds intercept/base: errors, environment, fault points, the connection to the agent.
// Requires the GIL. Errors: Python exceptions of the same names as in intercept/base/error.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "intercept/base/agent_client.h"

namespace reft {

void bindBase(pybind11::module_& module);

}  // namespace reft
