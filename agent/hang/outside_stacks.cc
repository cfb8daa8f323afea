#include "agent/hang/outside_stacks.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

namespace reft::agent {

namespace {

constexpr int kMaxThreads = 64;
std::atomic<int> threads{0};

}  // namespace

OutsideStacks::OutsideStacks(int wake) : found_(std::make_shared<Found>()) {
  found_->wake.reset(wake >= 0 ? ::fcntl(wake, F_DUPFD_CLOEXEC, 0) : -1);
}

void OutsideStacks::read(const std::vector<int>& pids) {
  std::vector<std::pair<int, std::shared_ptr<std::optional<RemoteStacks>>>> tasks;
  for (const int pid : pids) {
    auto place = std::make_shared<std::optional<RemoteStacks>>();
    if (found_->processes.emplace(pid, place).second) {
      tasks.emplace_back(pid, std::move(place));
    }
  }
  if (tasks.empty()) {
    return;
  }
  const auto refuse = [&tasks](const char* why) {
    for (const auto& [pid, place] : tasks) {
      *place = RemoteStacks{"", "", why};
    }
  };
  if (threads >= kMaxThreads) {
    refuse("too many reads of other processes do not come back");
    return;
  }
  ++threads;
  try {
    std::thread thread([found = found_, tasks] {
      for (const auto& [pid, place] : tasks) {
        RemoteStacks read;
        try {
          read = readRemoteStacks(pid);
        } catch (...) {  // no memory left
          read.error = "its memory cannot be read now";
        }
        const std::lock_guard<std::mutex> lock(found->mutex);
        *place = std::move(read);
      }
      const uint64_t one = 1;
      [[maybe_unused]] const auto written =
          found->wake ? ::write(found->wake.get(), &one, sizeof(one)) : 0;
      --threads;
    });
    ::pthread_setname_np(thread.native_handle(), "agent-outside");
    thread.detach();
  } catch (const std::system_error&) {
    --threads;
    refuse("there can be no more threads");
  }
}

bool OutsideStacks::done() const {
  const std::lock_guard<std::mutex> lock(found_->mutex);
  return std::all_of(found_->processes.begin(), found_->processes.end(),
                     [](const auto& entry) { return entry.second->has_value(); });
}

std::optional<RemoteStacks> OutsideStacks::of(int pid) const {
  const std::lock_guard<std::mutex> lock(found_->mutex);
  const auto place = found_->processes.find(pid);
  return place == found_->processes.end() ? std::nullopt : *place->second;
}

}  // namespace reft::agent
