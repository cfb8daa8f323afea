#include "snapshot/engine/copy_threads.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <system_error>
#include <utility>

#include "snapshot/engine/node_affinity.h"
#include "snapshot/engine/telemetry.h"

namespace reft {

namespace {

constexpr int kCopyNice = 10;

// Copies yield to training; the gate helps with what is left, so a low priority cannot delay the
// next step for long. Relative to training, which may itself run with another priority than 0.
void beginCopyThread() {
  ::pthread_setname_np(::pthread_self(), "reft-copy");
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  ::setpriority(PRIO_PROCESS, thread, ::getpriority(PRIO_PROCESS, thread) + kCopyNice);
}

}  // namespace

CopyThreads::CopyThreads(uint32_t count, CopyContext& context, Chores chores, Starter start)
    : context_(context), chores_(std::move(chores)), start_(start) {
  try {
    threads_.reserve(1);  // a thread that has started must not be lost
    threads_.push_back(start_([this] { runFirst(); }));
    grow(count);
  } catch (...) {
    stop();  // no destructor runs, and a thread that is not joined would end the process
    throw;
  }
}

CopyThreads::~CopyThreads() {
  stop();
}

void CopyThreads::grow(uint32_t count) {
  if (count <= wanted_) {
    return;
  }
  wanted_ = count;
  threads_.reserve(count);
  try {
    while (threads_.size() < count) {
      threads_.push_back(start_([this] { runHelper(); }));
      helped_.store(true);
    }
  } catch (const std::system_error& error) {
    // Helpers only save time. Where threads are limited, copies do without.
    context_.telemetry.failed("started " + std::to_string(threads_.size()) + " of " +
                              std::to_string(count) + " copy threads: " + error.what());
  }
}

void CopyThreads::stop() {
  {
    const MutexLock lock(mutex_);
    context_.stopping.store(true);
    if (job_ != nullptr) {
      job_->fail();
    }
  }
  help_wanted_.notify_all();
  context_.events.wake();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

std::shared_ptr<SnapshotJob> CopyThreads::job() const {
  const MutexLock lock(mutex_);
  return job_;
}

void CopyThreads::post(std::shared_ptr<SnapshotJob> job) {
  const MutexLock lock(mutex_);
  job_ = std::move(job);
}

void CopyThreads::retire(const SnapshotJob& job) {
  const MutexLock lock(mutex_);
  if (job_.get() == &job) {
    job_.reset();
  }
}

void CopyThreads::callHelpers() {
  if (helped_.load()) {
    // Under the mutex, so that a helper cannot miss it between its look and its sleep.
    { const MutexLock lock(mutex_); }
    help_wanted_.notify_all();
  }
}

void CopyThreads::runHelper() {
  beginCopyThread();
  NodeAffinity affinity;
  while (true) {
    std::shared_ptr<SnapshotJob> job;
    {
      const MutexLock lock(mutex_);
      help_wanted_.wait(mutex_, [this]() REQUIRES(mutex_) {
        return context_.stopping.load() ||
               (job_ != nullptr && job_->released() && job_->copier->hasWork());
      });
      if (context_.stopping.load()) {
        return;
      }
      job = job_;
    }
    affinity.follow(job->node);
    job->copier->copyRest();
  }
}

void CopyThreads::runFirst() {
  beginCopyThread();
  NodeAffinity affinity;
  const auto news = [this] { return context_.attention.load() || context_.stopping.load(); };
  while (true) {
    std::shared_ptr<SnapshotJob> job;
    bool claimed = false;
    context_.attention.store(false);
    {
      const MutexLock lock(mutex_);
      if (context_.stopping.load()) {
        return;
      }
      job = job_;
      claimed = job != nullptr && job->claim();
    }
    if (claimed) {
      chores_.finish(*job);
    } else if (job != nullptr && job->copier->hasWork()) {
      affinity.follow(job->node);
      job->copier->place();
    } else {
      context_.events.sleep(0, chores_.idle(), context_.clock, news);
    }
    chores_.always();
  }
}

}  // namespace reft
