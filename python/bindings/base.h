// Binds intercept/base: errors, environment, fault points, the connection to the agent.
// Requires the GIL. Errors: Python exceptions of the same names as in intercept/base/error.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string_view>

#include "intercept/link/agent_client.h"

namespace reft {

// Text of a log that anybody may have written: what is no UTF-8 becomes U+FFFD.
pybind11::str textOf(std::string_view bytes);

void bindBase(pybind11::module_& module);

}  // namespace reft
