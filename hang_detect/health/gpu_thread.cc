#include "hang_detect/health/gpu_thread.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "hang_detect/health/gpu_reader.h"
#include "intercept/base/clock.h"

namespace reft {

struct GpuThread::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  bool asked = false;                      // under mutex
  bool busy = false;                       // under mutex: a sample is being read
  std::optional<HardwareSample> finished;  // under mutex
  GpuReader::Progress progress;
  std::atomic<int> thread{0};  // its id; 0: it could not be started

  void run(const NvmlApi& api) {
    thread = ::gettid();
    GpuReader reader(api, progress);
    for (;;) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return asked; });
        asked = false;
        busy = true;
      }
      HardwareSample sample;
      reader.read(sample);
      const std::lock_guard lock(mutex);
      busy = false;
      finished = std::move(sample);
      changed.notify_all();
    }
  }
};

namespace {

// Whether the thread runs or waits for a processor: it is slow then, and not blocked.
bool runs(int thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  return name_end != text.npos && text.substr(name_end, 3) == ") R";
}

}  // namespace

GpuThread::GpuThread(NvmlApi api, Limits limits)
    : shared_(std::make_shared<Shared>()),
      limits_(limits),
      begun_(std::chrono::steady_clock::now()) {
  try {
    std::thread thread([shared = shared_, api] { shared->run(api); });
    ::pthread_setname_np(thread.native_handle(), "health-nvml");
    thread.detach();
  } catch (const std::system_error&) {
    shared_ = nullptr;
  }
}

void GpuThread::sample(HardwareSample& sample) {
  if (shared_ == nullptr) {
    sample.nvml = "failed";
    sample.nvml_text = "no thread can be started";
    return;
  }
  std::unique_lock lock(shared_->mutex);
  if (const auto late = std::exchange(shared_->finished, std::nullopt)) {
    sample.xids = late->xids;  // of an earlier call that gave up; each Xid is reported once
  }
  shared_->asked = shared_->asked || !shared_->busy;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, limits_.answer, [this] { return shared_->finished.has_value(); });
  if (auto finished = std::exchange(shared_->finished, std::nullopt)) {
    sample.nvml = std::move(finished->nvml);
    sample.nvml_text = std::move(finished->nvml_text);
    sample.gpus = std::move(finished->gpus);
    for (XidSample& xid : finished->xids) {
      sample.xids.push_back(std::move(xid));
    }
    return;
  }
  lock.unlock();
  const GpuReader::Progress& progress = shared_->progress;
  const char* const call = progress.call;
  const int gpu = progress.gpu;
  const int64_t blocked_ns = SteadyClock::instance().nowNs() - progress.since_ns;
  const bool patient = !progress.began && std::chrono::steady_clock::now() - begun_ < limits_.begin;
  const auto limit_ns = std::chrono::nanoseconds(limits_.answer).count();
  sample.nvml = "starting";
  if (call != nullptr && !patient && blocked_ns >= limit_ns / 2 && !runs(shared_->thread)) {
    sample.nvml = "silent";
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.1f s", static_cast<double>(blocked_ns) * 1e-9);
    sample.nvml_text = std::string(call) + (gpu < 0 ? "" : " of GPU " + std::to_string(gpu)) +
                       " has not returned for " + seconds;
  }
}

}  // namespace reft
