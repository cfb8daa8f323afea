#include "python/bindings/simulate.h"

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "snapshot/placement/simulate/simulator.h"

namespace py = pybind11;

namespace reft {

namespace {

using nlohmann::json;

PlacementPolicy policyNamed(const std::string& name) {
  for (const PlacementPolicy policy : {PlacementPolicy::kGap, PlacementPolicy::kEager,
                                       PlacementPolicy::kSync, PlacementPolicy::kPaper}) {
    if (name == placementPolicyName(policy)) {
      return policy;
    }
  }
  throw InvalidArgument("policy", "'" + name + "'", "gap, eager, sync, paper");
}

simulate::SimulationOptions parse(const std::string& text) {
  simulate::SimulationOptions options;
  simulate::ScheduleSpec& schedule = options.schedule;
  PlacerOptions& placer = options.placer;
  const auto into = [](auto& target) {
    return [&target](const json& value) { value.get_to(target); };
  };
  const std::map<std::string, std::function<void(const json&)>> fields = {
      {"schedule",
       [&](const json& value) {
         schedule.kind = simulate::scheduleNamed(value.get<std::string>());
       }},
      {"stages", into(schedule.stages)},
      {"replicas", into(schedule.replicas)},
      {"micro_batches", into(schedule.micro_batches)},
      {"chunks_per_rank", into(schedule.chunks_per_rank)},
      {"forward_ns", into(schedule.forward_ns)},
      {"backward_ns", into(schedule.backward_ns)},
      {"optimizer_ns", into(schedule.optimizer_ns)},
      {"activation_bytes", into(schedule.activation_bytes)},
      {"gradient_bytes", into(schedule.gradient_bytes)},
      {"layers", into(schedule.layers)},
      {"link_bytes_per_sec", into(schedule.link_bytes_per_sec)},
      {"policy", [&](const json& value) { placer.policy = policyNamed(value.get<std::string>()); }},
      {"chunk_bytes", into(placer.chunk_bytes)},
      {"shared_link", into(placer.shared_link)},
      {"overhead_limit", into(options.overhead_limit)},
      {"snapshot_bytes", into(options.snapshot_bytes)},
      {"at_once_bytes", into(options.at_once_bytes)},
      {"copy_bytes_per_sec", into(options.copy_bytes_per_sec)},
      {"compute_slowdown", into(options.compute_slowdown)},
      {"communication_slowdown", into(options.communication_slowdown)},
      {"jitter", into(options.jitter)},
      {"seed", into(options.seed)},
      {"steps", into(options.steps)},
      {"warm_up_steps", into(options.warm_up_steps)},
  };
  try {
    const json given = parseJson(text);
    if (!given.is_object()) {
      throw InvalidArgument("options: not a JSON object");
    }
    for (const auto& [name, value] : given.items()) {
      const auto field = fields.find(name);
      if (field == fields.end()) {
        throw InvalidArgument("option '" + name + "' is not known");
      }
      field->second(value);
    }
  } catch (const json::exception& error) {
    throw InvalidArgument(error.what());
  }
  return options;
}

std::string run(const std::string& text) {
  const simulate::SimulationResult result = simulate::runSimulation(parse(text));
  json bytes;
  for (size_t tier = 0; tier < kTiers; ++tier) {
    bytes[tierName(static_cast<Tier>(tier))] = result.bytes[tier];
  }
  return json{{"iteration_ns", result.iteration_ns},
              {"bubble_ns", result.bubble_ns},
              {"exposed_communication_ns", result.exposed_communication_ns},
              {"stall_ns", result.stall_ns},
              {"bytes", bytes},
              {"snapshots_per_step", result.snapshots_per_step},
              {"every", result.every},
              {"error_median", result.error_median},
              {"error_worst", result.error_worst},
              {"foretold_share", result.foretold_share},
              {"longest_overrun_chunks", result.longest_overrun_chunks}}
      .dump();
}

}  // namespace

void bindSimulate(py::module_& module) {
  module.def("simulate", &run, py::arg("options"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace reft
