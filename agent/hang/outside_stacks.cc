#include "agent/hang/outside_stacks.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

namespace reft::agent {

namespace {

constexpr int kMaxThreads = 64;
std::atomic<int> threads{0};

}  // namespace

OutsideStacks::OutsideStacks(int wake) : shared_(std::make_shared<Shared>()) {
  shared_->wake.reset(wake >= 0 ? ::fcntl(wake, F_DUPFD_CLOEXEC, 0) : -1);
}

void OutsideStacks::Shared::add(Result result) {
  {
    const MutexLock lock(mutex);
    finished.push_back(std::move(result));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = wake ? ::write(wake.get(), &one, sizeof(one)) : 0;
}

void OutsideStacks::read(uint64_t look, const std::vector<int>& pids) {
  const auto refuse = [&](const char* why) {
    for (const int pid : pids) {
      shared_->add({look, pid, RemoteStacks{"", "", why}});
    }
  };
  if (threads >= kMaxThreads) {
    refuse("too many reads of other processes are stuck");
    return;
  }
  ++threads;
  try {
    std::thread thread([shared = shared_, look, pids] {
      for (const int pid : pids) {
        RemoteStacks stacks;
        try {
          stacks = readRemoteStacks(pid);
        } catch (...) {  // no memory left
          stacks.error = "its memory cannot be read now";
        }
        shared->add({look, pid, std::move(stacks)});
      }
      --threads;
    });
    ::pthread_setname_np(thread.native_handle(), "agent-outside");
    thread.detach();
  } catch (const std::system_error&) {
    --threads;
    refuse("no more threads can be started");
  }
}

std::vector<OutsideStacks::Result> OutsideStacks::finished() {
  const MutexLock lock(shared_->mutex);
  return std::exchange(shared_->finished, {});
}

}  // namespace reft::agent
