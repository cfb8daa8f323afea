#include "intercept/record/device_activity.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace reft {

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr int kAttempts = 100;  // to read a slot whose owner makes call after call

const ActivityTable* tableOfProcess() {
  // The library is preloaded or absent: neither changes while the process runs.
  static const ActivityTable* const table = [] {
    using Find = const ActivityTable* (*)();
    const auto find = reinterpret_cast<Find>(::dlsym(RTLD_DEFAULT, "reft_device_activity"));
    return find == nullptr ? nullptr : find();
  }();
  return table;
}

DeviceActivity::State stateOf(const ActivityTable& table) {
  switch (table.state.load(std::memory_order_acquire)) {
    case ActivityTable::kArmed: return DeviceActivity::kArmed;
    case ActivityTable::kOff: return DeviceActivity::kOff;
    case ActivityTable::kDisarmed: return DeviceActivity::kDisarmed;
    default: return DeviceActivity::kInert;
  }
}

struct SlotView {
  DeviceActivity::Call call;
  DeviceActivity::Launch launch;
};

// nullopt: the owner began a call during each attempt, so it is in none for long.
std::optional<SlotView> viewOf(const ActivitySlot& slot) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const uint64_t version = slot.version.load(std::memory_order_acquire);
    if (version % 2 != 0) {
      continue;
    }
    SlotView view;
    view.call = {slot.owner.load(kRelaxed), slot.call.load(kRelaxed), slot.object.load(kRelaxed),
                 slot.since_ns.load(kRelaxed), version};
    view.launch = {view.call.thread, slot.launch_call.load(kRelaxed), slot.kernel.load(kRelaxed),
                   slot.launch_ns.load(kRelaxed), slot.unloads.load(kRelaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (slot.version.load(kRelaxed) == version) {
      return view;
    }
  }
  return std::nullopt;
}

// A thread that was cancelled inside a call, or one of the parent after a fork, left its slot so.
bool alive(pid_t thread) {
  return ::syscall(SYS_tgkill, ::getpid(), thread, 0) == 0 || errno != ESRCH;
}

}  // namespace

DeviceActivity readDeviceActivity(const ActivityTable* table) {
  DeviceActivity result;
  if (table == nullptr) {
    return result;
  }
  if (table->layout != ActivityTable::kLayout) {
    result.state = DeviceActivity::kForeign;
    return result;
  }
  result.state = stateOf(*table);
  result.hooked = table->hooked.load(kRelaxed);
  result.unhooked = table->unhooked.load(kRelaxed);
  if (const int code = table->error.load(std::memory_order_acquire); code > 0) {
    result.error = {code, table->error_ns.load(kRelaxed)};
  }
  for (size_t kind = 0; kind < kCallKinds; ++kind) {
    result.counts[kind] = table->untracked[kind].load(kRelaxed);
    result.untracked += result.counts[kind];
  }
  for (const ActivitySlot& slot : table->slots) {
    if (slot.owner.load(std::memory_order_acquire) == 0) {
      continue;
    }
    for (size_t kind = 0; kind < kCallKinds; ++kind) {
      result.counts[kind] += slot.counts[kind].load(kRelaxed);
    }
    const auto view = viewOf(slot);
    if (!view) {
      continue;
    }
    if (view->launch.at_ns != 0 && (!result.launch || result.launch->at_ns < view->launch.at_ns)) {
      result.launch = view->launch;
    }
    if (view->call.call != DriverCall::none && alive(view->call.thread)) {
      result.in_call.push_back(view->call);
    }
  }
  std::sort(result.in_call.begin(), result.in_call.end(),
            [](const auto& a, const auto& b) { return a.since_ns < b.since_ns; });
  return result;
}

DeviceActivity readDeviceActivity() {
  return readDeviceActivity(tableOfProcess());
}

std::optional<std::string> nameOfKernel(const DeviceActivity::Launch& launch) {
  const ActivityTable* const table = tableOfProcess();
  if (table == nullptr || table->layout != ActivityTable::kLayout ||
      table->unloads.load(std::memory_order_acquire) != launch.unloads) {
    return std::nullopt;
  }
  // Loaded already, as something was launched.
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) {
    return std::nullopt;
  }
  std::optional<std::string> name;
  for (const char* symbol : {"cuFuncGetName", "cuKernelGetName"}) {  // a launch takes either handle
    using GetName = int (*)(const char** name, void* kernel);
    const auto get = reinterpret_cast<GetName>(::dlsym(driver, symbol));
    const char* text = nullptr;
    if (!name && get != nullptr && get(&text, reinterpret_cast<void*>(launch.kernel)) == 0 &&
        text != nullptr) {
      name = text;
    }
  }
  ::dlclose(driver);
  return name;
}

const char* wordOf(CallKind kind) {
  constexpr const char* kWords[kCallKinds] = {
      "launch",      "graph launch", "copy",         "fill",         "blocking copy",
      "stream sync", "event sync",   "context sync", "event record", "unload"};
  return kind < CallKind::kCount ? kWords[static_cast<size_t>(kind)] : "";
}

}  // namespace reft
