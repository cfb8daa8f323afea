#include "agent/health/hardware_watch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "intercept/base/log.h"

namespace reft::agent {

namespace {

constexpr int kAnswerTicks = 20;  // of a quarter of a second
constexpr int64_t kRetryNs = 60 * kSecond;

void addCounters(HardwareCounters& base, const HardwareCounters& counters) {
  base.insert(counters.begin(), counters.end());  // those that it lacks
}

// Adds the devices and counters that `base` lacks.
void complete(HardwareSample& base, const HardwareSample& sample) {
  for (const GpuSample& gpu : sample.gpus) {
    const auto known = std::ranges::find_if(base.gpus, [&](const GpuSample& other) {
      return gpu.uuid.empty() || other.uuid.empty() ? gpu.index == other.index
                                                    : gpu.uuid == other.uuid;
    });
    if (known == base.gpus.end()) {
      if (base.gpus.size() < kMaxGpus) {
        base.gpus.push_back(gpu);
      }
    } else if (!known->gone) {
      addCounters(known->counters, gpu.counters);
    }
  }
  for (const NetworkSample& device : sample.network) {
    const auto known = std::ranges::find_if(base.network, [&](const NetworkSample& other) {
      return device.device == other.device && device.infiniband == other.infiniband;
    });
    if (known == base.network.end()) {
      if (base.network.size() < kMaxNetworkDevices) {
        base.network.push_back(device);
      }
    } else {
      addCounters(known->counters, device.counters);
    }
  }
}

// Adds the Xids of a sample to those that are known.
void addXids(std::vector<XidSample>& known, const std::vector<XidSample>& more) {
  for (const XidSample& xid : more) {
    const auto same = std::ranges::find_if(known, [&](const XidSample& other) {
      return other.number == xid.number && other.pci == xid.pci;
    });
    if (same != known.end()) {
      same->from_nvml += xid.from_nvml;
      same->from_kernel_log += xid.from_kernel_log;
      same->pid = xid.pid > 0 ? xid.pid : same->pid;
    } else if (known.size() < kMaxXids) {
      known.push_back(xid);
    }
  }
}

}  // namespace

void HardwareWatch::ask(int64_t now_ns) {
  if (!wanted_ || sampling() || now_ns < retry_ns_) {
    return;
  }
  sampled_ns_ = now_ns;
  due_ns_ = now_ns + kEveryNs;
  if (source_.ask()) {
    asked_ns_ = now_ns;
    ticks_ = 0;
  } else {
    retry_ns_ = now_ns + kRetryNs;
  }
}

void HardwareWatch::joined(uint64_t incarnation, int64_t now_ns) {
  idle_since_ns_ = 0;
  if (incarnation == incarnation_) {
    return;
  }
  incarnation_ = incarnation;
  new_attempt_ = true;
  attempt_later_ = ask_again_ = sampling();
  ask(now_ns);
}

void HardwareWatch::investigates(bool again, int64_t now_ns) {
  ask_again_ = ask_again_ || (again && sampling());
  if (again || samples_ == 0 || now_ns - sampled_ns_ >= kFreshNs) {
    ask(now_ns);
  }
}

void HardwareWatch::tick(bool live, int64_t now_ns) {
  step(now_ns);
  if (sampling() && ++ticks_ >= kAnswerTicks && now_ns - asked_ns_ >= kAnswerNs) {
    logWarn("agent", "the reader of hardware counters does not answer: it is ended");
    source_.kill();
    failed(now_ns);
    silent_ = true;
    conclude();
  }
  if (live) {
    idle_since_ns_ = 0;
    if (due_ns_ != 0 && now_ns >= due_ns_) {
      ask(now_ns);
    }
  } else if (idle_since_ns_ == 0) {
    idle_since_ns_ = now_ns;
  } else if (now_ns - idle_since_ns_ >= kIdleNs && !sampling() && source_.running()) {
    source_.kill();  // it keeps the driver in use
  }
}

void HardwareWatch::step(int64_t now_ns) {
  while (const auto line = source_.line()) {
    if (auto sample = hardwareSampleFrom(*line)) {
      take(std::move(*sample), now_ns);
    }
  }
  if (sampling() && !source_.running()) {  // it has ended without an answer
    failed(now_ns);
  }
}

void HardwareWatch::failed(int64_t now_ns) {
  asked_ns_ = 0;
  attempt_later_ = ask_again_ = false;
  retry_ns_ = now_ns + kRetryNs;
}

void HardwareWatch::take(HardwareSample sample, int64_t now_ns) {
  asked_ns_ = 0;
  silent_ = false;
  // Seconds at most: so many as a program may take that is not killed.
  const auto took_ns = static_cast<int64_t>(std::min(sample.took_sec, 3600.0) * 1e9);
  due_ns_ = now_ns + std::max(kEveryNs, took_ns * kMostShare);
  if (sample.nvml != "ok") {
    sample.gpus = std::move(history_.newest.gpus);  // as they were when NVML last answered
  }
  std::vector<XidSample> xids = std::move(history_.newest.xids);
  addXids(xids, sample.xids);
  sample.xids = std::move(xids);
  complete(history_.first, sample);
  if (!std::exchange(attempt_later_, false) && std::exchange(new_attempt_, false)) {
    history_.attempt = sample;
  }
  if (std::exchange(ask_again_, false)) {
    ask(now_ns);
  }
  complete(history_.attempt, sample);
  history_.newest = std::move(sample);
  ++samples_;
  conclude();
}

void HardwareWatch::conclude() {
  std::vector<HardwareNote> notes = hardwareNotes(history_, 0);
  if (silent_) {
    notes.push_back(
        {0, false, "the reader of hardware counters (NVML, network cards) does not answer"});
  }
  for (const HardwareNote& note : notes) {
    if (std::ranges::find(notes_, note) == notes_.end()) {
      logInfo("agent", "hardware: ", note.text);
    }
  }
  notes_ = std::move(notes);
}

}  // namespace reft::agent
