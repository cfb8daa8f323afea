// The threads `reft-copy` of an engine, and the job that they work on.
//
// The first one places the chunks of the job, claims it when it is checked, and does the engine's
// chores in between; it sleeps until CopyContext::wake(). The others help once the job is released.
// All run at a lower priority than the thread that trains, and on its NUMA node.
//
// Threads: any. The destructor stops and joins the threads; an unclaimed job fails and stays
// unsealed.
// Errors: the constructor throws std::system_error if the first thread cannot be made. Without
// further ones, copies are slower, and the telemetry counts a failure.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "intercept/base/mutex.h"
#include "snapshot/engine/copier.h"
#include "snapshot/engine/snapshot_job.h"

namespace reft {

class CopyThreads {
 public:
  // On the first thread.
  struct Chores {
    std::function<void(SnapshotJob&)> finish;  // the job that it has claimed
    std::function<int64_t()> idle;             // returns the time of the next call
    std::function<void()> always;              // after each of the above, and after each placement
  };

  // Returns a thread that runs `body`, or throws std::system_error.
  using Starter = std::thread (*)(std::function<void()> body);

  // `context` outlives it. The system limits threads, and memory for their stacks; `start` lets
  // tests do so, too.
  CopyThreads(uint32_t count, CopyContext& context, Chores chores, Starter start = startThread);
  ~CopyThreads();
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;

  // The job under way; nullptr: none.
  std::shared_ptr<SnapshotJob> job() const EXCLUDES(mutex_);
  void post(std::shared_ptr<SnapshotJob> job) EXCLUDES(mutex_);
  // The job is sealed or dropped. Nothing happens if another one is under way.
  void retire(const SnapshotJob& job) EXCLUDES(mutex_);
  // The job was released.
  void callHelpers() EXCLUDES(mutex_);
  // Starts helpers up to `count` threads in all; does nothing if there were once so many. One
  // thread at a time calls it.
  void grow(uint32_t count);

 private:
  static std::thread startThread(std::function<void()> body) {
    return std::thread(std::move(body));
  }
  void stop() EXCLUDES(mutex_);
  void runFirst() EXCLUDES(mutex_);
  void runHelper() EXCLUDES(mutex_);

  CopyContext& context_;
  const Chores chores_;
  const Starter start_;
  std::atomic<bool> helped_{false};
  uint32_t wanted_ = 1;

  mutable Mutex mutex_;
  ConditionVariable help_wanted_;
  std::shared_ptr<SnapshotJob> job_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // of the caller of grow() and of the destructor
};

}  // namespace reft
