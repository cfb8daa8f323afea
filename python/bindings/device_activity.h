// What this process does on its CUDA devices: intercept/record/device_activity.h.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindDeviceActivity(pybind11::module_& module);

}  // namespace reft
