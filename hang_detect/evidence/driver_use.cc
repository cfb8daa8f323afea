#include "hang_detect/evidence/driver_use.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/json_fields.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"
#include "intercept/driver/device_error.h"

namespace reft {

namespace {

using json_fields::each;
using json_fields::flag;
using json_fields::number;
using json_fields::text;
using nlohmann::json;

constexpr size_t kMaxName = 256;

}  // namespace

const DriverUse::Call* DriverUse::waitOf(uint16_t tid_bits) const {
  const auto found = std::find_if(calls.begin(), calls.end(), [tid_bits](const Call& call) {
    return call.waits && static_cast<uint16_t>(call.thread) == tid_bits;
  });
  return found == calls.end() ? nullptr : &*found;
}

std::string DriverUse::launchSentence() const {
  if (!known || launches <= 0 || launch_sec < 0) {
    return "";
  }
  return "the newest of " + std::to_string(launches) + " launches was " +
         (kernel.empty() ? "of a kernel without a name" : printable(kernel, 80)) + ", " +
         words::seconds(launch_sec) + " ago";
}

std::string DriverUse::errorSentence() const {
  return error == 0 ? ""
                    : describeDeviceError(error) + ", seen " + words::seconds(error_sec) + " ago";
}

json driverUseFields(const DriverUse& use) {
  if (!use.known && use.error == 0) {
    return nullptr;
  }
  json calls = json::array();
  for (const DriverUse::Call& call : use.calls) {
    calls.push_back({{"tid", call.thread},
                     {"name", call.name},
                     {"waits", call.waits},
                     {"since_sec", call.since_sec}});
  }
  return {{"observed", use.known},    {"error", use.error},   {"error_sec", use.error_sec},
          {"launches", use.launches}, {"kernel", use.kernel}, {"launch_sec", use.launch_sec},
          {"calls", std::move(calls)}};
}

DriverUse driverUseFrom(const json& fields) {
  DriverUse use;
  if (!fields.is_object()) {
    return use;
  }
  use.known = flag(fields, "observed");
  use.error = std::max(0, number<int>(fields, "error", 0));
  use.error_sec = std::max(0.0, number<double>(fields, "error_sec", 0));
  use.launches = std::max<int64_t>(0, number<int64_t>(fields, "launches", 0));
  use.kernel = text(fields, "kernel", kMaxName);
  use.launch_sec = number<double>(fields, "launch_sec", -1);
  each(fields, "calls", [&](const json& call) {
    if (use.calls.size() < DriverUse::kMaxCalls) {
      use.calls.push_back({number<int>(call, "tid", 0), text(call, "name", kMaxName),
                           flag(call, "waits"), number<double>(call, "since_sec", 0)});
    }
  });
  return use;
}

}  // namespace reft
