#include "agent/outside_stacks.h"

#include <pthread.h>

#include <atomic>
#include <system_error>
#include <thread>

namespace reft::agent {

namespace {

constexpr int kMaxThreads = 64;
std::atomic<int> threads{0};

}  // namespace

void OutsideStacks::read(int rank, int pid) {
  if (found_ == nullptr) {
    found_ = std::make_shared<Found>();
  }
  auto place = std::make_shared<std::optional<RemoteStacks>>();
  if (!found_->ranks.emplace(rank, place).second) {
    return;
  }
  if (threads >= kMaxThreads) {
    *place = RemoteStacks{"", "", "too many reads of other processes do not come back"};
    return;
  }
  ++threads;
  try {
    std::thread thread([found = found_, place, pid] {
      RemoteStacks read;
      try {
        read = readRemoteStacks(pid);
      } catch (...) {  // no memory left
        read.error = "its memory cannot be read now";
      }
      const std::lock_guard<std::mutex> lock(found->mutex);
      *place = std::move(read);
      --threads;
    });
    ::pthread_setname_np(thread.native_handle(), "agent-outside");
    thread.detach();
  } catch (const std::system_error&) {
    --threads;
    *place = RemoteStacks{"", "", "there can be no more threads"};
  }
}

std::optional<RemoteStacks> OutsideStacks::of(int rank) const {
  if (found_ == nullptr) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(found_->mutex);
  const auto place = found_->ranks.find(rank);
  return place == found_->ranks.end() ? std::nullopt : *place->second;
}

}  // namespace reft::agent
