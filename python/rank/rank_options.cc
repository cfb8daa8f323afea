#include "python/rank/rank_options.h"

#include "intercept/base/error.h"

namespace reft {

namespace {

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

RankOptions RankOptions::from(const Env& env) {
  const auto number = [&](const char* member) {
    return static_cast<uint32_t>(env.integer(member));
  };
  RankOptions options;
  options.slots = number("snapshot_slots");
  options.op_log_records = number("op_log_records");
  options.copy_threads = number("snapshot_threads");
  options.verify_full = env.text("snapshot_verify") == "full";
  options.slot_wait = nanoseconds(env.seconds("snapshot_wait_sec"));
  if (env.flag("snapshot")) {
    options.alarm = nanoseconds(env.seconds("snapshot_alarm_sec"));
  }
  options.chunk_bytes = static_cast<uint64_t>(env.integer("snapshot_chunk_bytes"));
  options.policy = policyNamed(env.text("snapshot_policy"));
  options.every = number("snapshot_every");
  options.overhead_percent = number("snapshot_overhead_percent");
  options.control_every = number("snapshot_control_every");
  options.redundancy = redundancyNamed(env.text("snapshot_protection"));
  return options;
}

Redundancy redundancyNamed(std::string_view setting) {
  Redundancy redundancy;
  if (const size_t copies = setting.find("peer"); copies != std::string_view::npos) {
    setting = copies == 0 ? "none" : setting.substr(0, copies - 1);
    redundancy.copied = true;
  }
  if (setting == "auto") {
    setting = "none";
  } else if (setting == "aor") {
    // What is computed on two ranks (python/reft/_state/recomputed.py) is state of replicas.
    setting = "arc";
  }
  redundancy.stored = &Protection::named(setting);
  return redundancy;
}

PlacementPolicy policyNamed(const std::string& name) {
  for (const auto policy :
       {PlacementPolicy::kEager, PlacementPolicy::kGap, PlacementPolicy::kSync}) {
    if (name == placementPolicyName(policy)) {
      return policy;
    }
  }
  throw InvalidArgument("policy", name, "eager, gap or sync");
}

}  // namespace reft
