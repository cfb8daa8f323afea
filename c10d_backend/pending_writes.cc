#include "c10d_backend/pending_writes.h"

#include <algorithm>
#include <utility>

namespace reft {

PendingWrites::Range PendingWrites::Range::of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) {
    return {};
  }
  if (tensor.is_non_overlapping_and_dense()) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return {begin, begin + tensor.nbytes()};
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return {begin, begin + tensor.storage().nbytes()};
}

std::vector<PendingWrites::Range> PendingWrites::rangesOf(const at::Tensor& tensor) {
  return {Range::of(tensor)};
}

std::vector<PendingWrites::Range> PendingWrites::rangesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<Range> ranges;
  ranges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    ranges.push_back(Range::of(tensor));
  }
  return ranges;
}

std::vector<PendingWrites::Range> PendingWrites::rangesOf(
    const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<Range> ranges;
  for (const std::vector<at::Tensor>& list : lists) {
    for (const at::Tensor& tensor : list) {
      ranges.push_back(Range::of(tensor));
    }
  }
  return ranges;
}

void PendingWrites::add(uint64_t ticket, OpKind kind, const c10::intrusive_ptr<c10d::Work>& work,
                        std::vector<Range> ranges) {
  if (ranges.empty()) {
    return;
  }
  const MutexLock lock(mutex_);
  entries_.push_back({ticket, kind, c10::weak_intrusive_ptr<c10d::Work>(work), std::move(ranges)});
}

void PendingWrites::remove(uint64_t ticket) {
  const MutexLock lock(mutex_);
  std::erase_if(entries_, [ticket](const Entry& entry) { return entry.ticket == ticket; });
}

std::optional<PendingWrites::Hit> PendingWrites::find(std::span<const Range> memory) {
  std::vector<std::pair<Hit, c10::intrusive_ptr<c10d::Work>>> touching;
  {
    const MutexLock lock(mutex_);
    // The last reference to a Work is gone only when nothing writes for it any more.
    std::erase_if(entries_, [](const Entry& entry) { return entry.work.expired(); });
    for (const Entry& entry : entries_) {
      for (size_t i = 0; i < memory.size(); ++i) {
        const auto overlaps = [&](const Range& range) {
          return range.begin < memory[i].end && memory[i].begin < range.end;
        };
        if (std::any_of(entry.ranges.begin(), entry.ranges.end(), overlaps)) {
          if (auto work = entry.work.lock()) {
            touching.push_back({{i, entry.kind}, std::move(work)});
          }
          break;
        }
      }
    }
  }
  for (const auto& [hit, work] : touching) {  // without the lock: the end of a Work may remove it
    if (!isDone(*work)) {
      return hit;
    }
  }
  return std::nullopt;
}

// A Work ends its future before it counts as completed itself, and who waits for the future goes
// on.
bool PendingWrites::isDone(c10d::Work& work) {
  if (work.isCompleted()) {
    return true;
  }
  try {
    const auto future = work.getFuture();
    return future && future->completed();
  } catch (const std::exception&) {  // it has none
    return false;
  }
}

PendingWrites& processPendingWrites() {
  static auto* const pending =
      new PendingWrites;  // callbacks of Works may outlive the process's end
  return *pending;
}

}  // namespace reft
