#include "hang_detect/rank/driver_use_now.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "intercept/base/clock.h"
#include "intercept/record/device_activity.h"

namespace reft {

namespace {

constexpr auto kNamePatience = std::chrono::milliseconds(200);

std::string nameWithin(const DeviceActivity::Launch& launch) {
  static bool lost = false;  // a thread is still in the driver
  if (lost) {
    return "";
  }
  auto name = std::make_shared<std::promise<std::string>>();
  std::future<std::string> answer = name->get_future();
  std::thread([name, launch] { name->set_value(nameOfKernel(launch).value_or("")); }).detach();
  if (answer.wait_for(kNamePatience) != std::future_status::ready) {
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

}  // namespace

DriverUse driverUseNow() {
  DriverUse use;
  try {
    const DeviceActivity activity = readDeviceActivity();
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
      use.kernel = nameWithin(*activity.launch);
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory or no thread left
  }
  return use;
}

}  // namespace reft
