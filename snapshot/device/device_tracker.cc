#include "snapshot/device/device_tracker.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace reft {

namespace {

constexpr size_t kMostWaiting = 1024;  // that wait for the next program point

bool contains(std::span<const DeviceStream> streams, const DeviceStream& one) {
  return std::find(streams.begin(), streams.end(), one) != streams.end();
}

}  // namespace

DeviceTracker::DeviceTracker(const CudaApi* api, DeviceMarks* marks, Vault& vault,
                             const Clock& clock)
    : api_(api), marks_(marks), vault_(vault), clock_(clock) {}

DeviceTracker::~DeviceTracker() {
  vault_.beforeMove(nullptr);
}

void DeviceTracker::beginPoint(int64_t step, std::span<const DeviceStream> streams) {
  at_point_ = true;
  mark(step, streams);
}

void DeviceTracker::mark(int64_t step, std::span<const DeviceStream> streams) {
  marked_step_ = -1;
  if (marks_ == nullptr || copy_ == nullptr) {
    return;
  }
  if (streams.size() != 1) {
    marks_->forget();
    return;
  }
  if (placement_ == nullptr) {
    placement_ = std::make_unique<DevicePlacement>(*copy_, *marks_, clock_);
    learning_.store(placement_.get(), std::memory_order_release);
  }
  if (placement_->point(streams.front(), step)) {
    marked_step_ = step;
    marked_ = streams.front();
  }
}

void DeviceTracker::pointOf(int64_t step, std::span<const DeviceStream> streams) {
  if (marked_step_ != step || streams.size() != 1 || streams.front() != marked_) {
    mark(step, streams);
  }
}

bool DeviceTracker::endPoint(uint64_t block, bool beside_copy, int64_t begin_ns, int64_t end_ns) {
  at_point_ = false;
  // An optimizer that does not step in each iteration has a model that may write in each.
  std::erase_if(stepped_, [](const DeviceStream& one) { return !one.lasting; });
  if (placement_ == nullptr) {
    return false;
  }
  placement_->pointDone(block, beside_copy, begin_ns, end_ns);
  return true;
}

std::vector<DeviceStep> DeviceTracker::takeSteps() {
  const MutexLock lock(mutex_);
  return std::exchange(steps_, {});
}

DeviceCopy& DeviceTracker::useDevices() {
  if (copy_ == nullptr) {
    copy_ = std::make_unique<DeviceCopy>(api_ == nullptr ? cudaApi() : *api_);
    vault_.beforeMove([this](std::byte* payload) { copy_->unpin(payload); });
  }
  return *copy_;
}

bool DeviceTracker::prepareSum(int device) {
  return useDevices().prepareSum(device);
}

bool DeviceTracker::hasSums(std::span<const int> devices) const {
  const int device = devices.empty() ? -1 : *std::ranges::max_element(devices);
  return device < 0 ||
         (copy_ != nullptr && copy_->hasSum(device) && std::ranges::all_of(devices, [&](int one) {
            return one < 0 || one == device;  // a sum is of one device
          }));
}

DeviceTracker::Begun DeviceTracker::begin(std::span<const DeviceStream> streams) {
  switch (useDevices().capturing(streams)) {
    case DeviceCopy::Capture::kThese: return Begun::kCapturing;
    case DeviceCopy::Capture::kOthers: return Begun::kCapturingElsewhere;
    case DeviceCopy::Capture::kNone: break;
  }
  return copy_->begin(streams) ? Begun::kYes : Begun::kBroken;
}

std::vector<DeviceStream> DeviceTracker::writersBeside(std::span<const DeviceStream> streams,
                                                       std::span<const DeviceStream> others) {
  std::vector<DeviceStream> candidates = stepped_;
  candidates.insert(candidates.end(), others.begin(), others.end());
  std::vector<DeviceStream> writers;
  for (const DeviceStream& one : candidates) {
    if (!contains(streams, one) && !contains(writers, one) &&
        copy_->capturing({&one, 1}) == DeviceCopy::Capture::kNone) {
      writers.push_back(one);
    }
  }
  return writers;
}

std::byte* DeviceTracker::extraMemory(size_t bytes) {
  if (bytes > extra_bytes_) {
    extra_bytes_ = std::max<size_t>(kPage, std::bit_ceil(bytes));
    extra_ = copy_->memory(extra_bytes_);
  }
  return extra_;
}

void DeviceTracker::stepOn(std::span<const DeviceStream> streams) {
  for (const DeviceStream& one : streams) {
    if (!contains(stepped_, one)) {
      stepped_.push_back(one);
    }
  }
}

void DeviceTracker::gate(std::span<const DeviceStream> streams, const std::function<void()>& hold) {
  const bool marked = placement_ != nullptr && streams.size() == 1 && !at_point_;
  if (marked) {
    placement_->gateBegin(streams.front());
  }
  hold();
  if (marked) {
    placement_->gateEnd(streams.front());
  }
}

void DeviceTracker::learn(const std::function<void(const Learned&)>& report) {
  DevicePlacement* const placement = learning_.load(std::memory_order_acquire);
  if (placement == nullptr) {
    return;
  }
  placement->learn();
  Learned learned;
  learned.untimed = placement->takeUntimed();
  learned.steps = placement->takeSteps();
  if (!learned.steps.empty()) {
    learned.errors = placement->errors();
  }
  report(learned);
  const MutexLock lock(mutex_);
  for (DeviceStep& step : learned.steps) {
    if (step.whole && steps_.size() < kMostWaiting) {
      steps_.push_back(std::move(step));
    }
  }
}

}  // namespace reft
