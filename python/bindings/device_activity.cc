#include "python/bindings/device_activity.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "intercept/record/device_activity.h"

namespace py = pybind11;

namespace reft {

namespace {

const char* wordOf(DeviceActivity::State state) {
  switch (state) {
    case DeviceActivity::kAbsent: return "absent";
    case DeviceActivity::kForeign: return "foreign";
    case DeviceActivity::kInert: return "inert";
    case DeviceActivity::kArmed: return "armed";
    case DeviceActivity::kOff: return "off";
    case DeviceActivity::kDisarmed: return "disarmed";
  }
  return "";
}

py::dict dictOf(const DeviceActivity::Launch& launch) {
  std::optional<std::string> name;
  {
    const py::gil_scoped_release unlocked;  // the driver may not answer
    name = nameOfKernel(launch);
  }
  py::dict result;
  result["thread"] = launch.thread;
  result["call"] = nameOf(launch.call);
  result["at_ns"] = launch.at_ns;
  result["kernel"] = name;
  return result;
}

py::dict dictOf(const DeviceActivity& activity) {
  py::dict counts;
  for (size_t kind = 0; kind < kCallKinds; ++kind) {
    counts[wordOf(static_cast<CallKind>(kind))] = activity.counts[kind];
  }
  py::list in_call;
  for (const DeviceActivity::Call& call : activity.in_call) {
    py::dict entry;
    entry["thread"] = call.thread;
    entry["call"] = nameOf(call.call);
    entry["since_ns"] = call.since_ns;
    in_call.append(entry);
  }
  py::dict result;
  result["state"] = wordOf(activity.state);
  result["counts"] = counts;
  result["launch"] = activity.launch ? py::object(dictOf(*activity.launch)) : py::none();
  result["in_call"] = in_call;
  result["untracked"] = activity.untracked;
  result["hooked"] = activity.hooked;
  result["unhooked"] = activity.unhooked;
  return result;
}

}  // namespace

void bindDeviceActivity(py::module_& module) {
  module.def("device_activity", [] { return dictOf(readDeviceActivity()); });
}

}  // namespace reft
