#include "hang_detect/rank/driver_use_now.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "intercept/base/clock.h"
#include "intercept/driver/device_error.h"
#include "intercept/record/device_activity.h"
#include "intercept/record/device_ops.h"

namespace reft {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(200);

// What `call` gives, which calls the driver and may never return; "" if it takes longer than
// kPatience, and from then on: a thread is still in the driver.
std::string within(std::function<std::string()> call) {
  static bool lost = false;
  if (lost) {
    return "";
  }
  auto given = std::make_shared<std::promise<std::string>>();
  std::future<std::string> answer = given->get_future();
  std::thread([given, call = std::move(call)] { given->set_value(call()); }).detach();
  if (answer.wait_for(kPatience) != std::future_status::ready) {
    lost = true;
    return "";
  }
  return answer.get();
}

bool waits(DriverCall call) {
  switch (kindOf(call)) {
    case CallKind::kBlockingCopy:
    case CallKind::kStreamSync:
    case CallKind::kEventSync:
    case CallKind::kContextSync: return true;
    default: return false;
  }
}

double secondsSince(int64_t then_ns) {
  return std::max(0.0, static_cast<double>(SteadyClock::instance().nowNs() - then_ns) * 1e-9);
}

DeviceError firstOf(const DeviceError& own, const DeviceError& of_others) {
  const bool other_first = of_others.code != 0 && (own.code == 0 || of_others.at_ns < own.at_ns);
  return other_first ? of_others : own;
}

}  // namespace

DriverUse driverUseNow() {
  DriverUse use;
  try {
    const DeviceActivity activity = readDeviceActivity();
    if (deviceError().code == 0 && activity.error.code == 0) {
      within([] {
        processDeviceOps().probe();
        return std::string();
      });
    }
    const DeviceError error = firstOf(deviceError(), activity.error);
    if (error.code != 0) {
      use.error = error.code;
      use.error_sec = secondsSince(error.at_ns);
    }
    if (activity.state != DeviceActivity::kArmed) {
      return use;
    }
    use.known = true;
    use.launches = static_cast<int64_t>(activity.count(CallKind::kLaunch) +
                                        activity.count(CallKind::kGraphLaunch));
    for (const DeviceActivity::Call& call : activity.in_call) {
      if (use.calls.size() < DriverUse::kMaxCalls) {
        use.calls.push_back(
            {call.thread, nameOf(call.call), waits(call.call), secondsSince(call.since_ns)});
      }
    }
    if (activity.launch) {
      use.launch_sec = secondsSince(activity.launch->at_ns);
      use.kernel =
          within([launch = *activity.launch] { return nameOfKernel(launch).value_or(""); });
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory or no thread left
  }
  return use;
}

}  // namespace reft
