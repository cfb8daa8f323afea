#include "intercept/nccl_profiler/plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>

#include "intercept/base/clock.h"
#include "intercept/base/mutex.h"
#include "intercept/nccl_profiler/listener.h"

namespace reft {

namespace nccl_plugin {

namespace {

using namespace nccl_abi;

constexpr char kVariable[] = "NCCL_PROFILER_PLUGIN";
constexpr size_t kLongestPath = 254;  // NCCL copies the name into 255 bytes

// Never destroyed: NCCL's threads may outlive static destructors.
std::atomic<NcclListener*> listener{nullptr};

NcclListener* armed() {
  return listener.load(std::memory_order_acquire);
}

// The coarse clock costs a fraction of the precise one and resolves 1 to 10 ms. Hangs last seconds.
int64_t now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

Result init(void** context, uint64_t hash, int* mask, const char* name, int nodes, int ranks,
            int rank, Logger /*logger*/) noexcept {
  NcclListener* const to = armed();
  if (to != nullptr && to->pid() == ::getpid()) {
    to->init(context, hash, mask, name, nodes, ranks, rank);
  } else {
    if (context != nullptr) {
      *context = nullptr;
    }
    if (mask != nullptr) {
      __atomic_store_n(mask, 0, __ATOMIC_RELAXED);
    }
  }
  return kSuccess;
}

Result initV4(void** context, int* mask, const char* name, uint64_t hash, int nodes, int ranks,
              int rank, Logger logger) noexcept {
  return init(context, hash, mask, name, nodes, ranks, rank, logger);
}

Result startTyped(void* context, void** handle, const EventV5* event, uint64_t type) noexcept {
  if (NcclListener* const to = armed()) {
    to->start(context, handle, event, type);
  } else if (handle != nullptr) {
    *handle = nullptr;
  }
  return kSuccess;
}

Result start(void* context, void** handle, EventV5* event) noexcept {
  return startTyped(context, handle, event, event != nullptr ? event->type : 0);
}

Result startV4(void* context, void** handle, EventV5* event) noexcept {
  uint8_t type = 0;
  if (event != nullptr) {
    std::memcpy(&type, &event->type, sizeof(type));
  }
  return startTyped(context, handle, event, type);
}

Result stop(void* handle) noexcept {
  if (NcclListener* const to = armed()) {
    to->stop(handle);
  }
  return kSuccess;
}

Result record(void* handle, int state, StateArgs* args) noexcept {
  if (NcclListener* const to = armed()) {
    to->record(handle, state, args);
  }
  return kSuccess;
}

Result finalize(void* context) noexcept {
  if (NcclListener* const to = armed()) {
    to->finalize(context);
  }
  return kSuccess;
}

std::string pathOfThisLibrary() {
  Dl_info info{};
  if (::dladdr(&listener, &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  char* const full = ::realpath(info.dli_fname, nullptr);
  std::string path = full != nullptr ? full : "";
  std::free(full);
  return path;
}

}  // namespace

}  // namespace nccl_plugin

NcclArming armNcclProfiler(bool kernels) {
  using namespace nccl_plugin;
  static Mutex arming;
  const MutexLock lock(arming);
  if (armed() != nullptr) {
    return NcclArming::kArmed;
  }
  const std::string path = pathOfThisLibrary();
  if (path.empty() || path.size() > kLongestPath) {
    return NcclArming::kNoPath;
  }
  const char* const named = std::getenv(kVariable);
  if (named != nullptr && named[0] != '\0' && path != named) {
    return NcclArming::kTaken;
  }
  if (::setenv(kVariable, path.c_str(), 1) != 0) {
    return NcclArming::kNoPath;
  }
  listener.store(new NcclListener(::getpid(), kernels, &now), std::memory_order_release);
  return NcclArming::kArmed;
}

const NcclProgressTable* ncclProgressTable() noexcept {
  const NcclListener* const to = nccl_plugin::armed();
  return to != nullptr ? &to->table() : nullptr;
}

}  // namespace reft

extern "C" {
extern const reft::nccl_abi::ProfilerV4 ncclProfiler_v4;
extern const reft::nccl_abi::ProfilerV5 ncclProfiler_v5;
extern const reft::nccl_abi::ProfilerV6 ncclProfiler_v6;

const reft::nccl_abi::ProfilerV4 ncclProfiler_v4 = {"reft",
                                                    reft::nccl_plugin::initV4,
                                                    reft::nccl_plugin::startV4,
                                                    reft::nccl_plugin::stop,
                                                    reft::nccl_plugin::record,
                                                    reft::nccl_plugin::finalize};
const reft::nccl_abi::ProfilerV5 ncclProfiler_v5 = {"reft",
                                                    reft::nccl_plugin::init,
                                                    reft::nccl_plugin::start,
                                                    reft::nccl_plugin::stop,
                                                    reft::nccl_plugin::record,
                                                    reft::nccl_plugin::finalize};
const reft::nccl_abi::ProfilerV6 ncclProfiler_v6 = ncclProfiler_v5;
}  // extern "C"
