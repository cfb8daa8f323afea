// std::mutex and std::condition_variable, annotated so that clang checks who holds which lock.
//
//   MutexLock lock(mutex_);
//   ready_.wait(mutex_, [this]() REQUIRES(mutex_) { return count_ > 0; });
//
// Methods carry the standard library's names and cost what the standard library's cost.
//
// Threads: any. Errors: none; a lock that the caller does not hold is undefined behaviour, as in
// the standard library, and a compile error under clang.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "intercept/base/thread_annotations.h"

namespace reft {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class ConditionVariable;
  std::mutex mutex_;
};

// Holds the mutex while it lives, except between unlock() and lock().
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() {
    if (held_) {
      mutex_.unlock();
    }
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() {
    mutex_.unlock();
    held_ = false;
  }
  void lock() ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// The caller holds the mutex; a wait gives it up and has it again when it returns.
class ConditionVariable {
 public:
  ConditionVariable() = default;
  ConditionVariable(const ConditionVariable&) = delete;
  ConditionVariable& operator=(const ConditionVariable&) = delete;

  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

  // May return without a notification: call it in a loop.
  void wait(Mutex& mutex) REQUIRES(mutex) {
    Native native(mutex);
    condition_.wait(native.lock);
  }

  template <typename Rep, typename Period>
  std::cv_status wait_for(Mutex& mutex, const std::chrono::duration<Rep, Period>& timeout)
      REQUIRES(mutex) {
    Native native(mutex);
    return condition_.wait_for(native.lock, timeout);
  }

  template <typename Clock, typename Duration>
  std::cv_status wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& deadline)
      REQUIRES(mutex) {
    Native native(mutex);
    return condition_.wait_until(native.lock, deadline);
  }

  // Waits until `done()`, which runs with the mutex held. The bounded forms return the last
  // `done()`. The analysis cannot match the predicate's lock with `mutex`; callers are still
  // checked.
  template <typename Predicate>
  void wait(Mutex& mutex, Predicate done) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    Native native(mutex);
    condition_.wait(native.lock, std::move(done));
  }

  template <typename Rep, typename Period, typename Predicate>
  bool wait_for(Mutex& mutex, const std::chrono::duration<Rep, Period>& timeout, Predicate done)
      REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    Native native(mutex);
    return condition_.wait_for(native.lock, timeout, std::move(done));
  }

  template <typename Clock, typename Duration, typename Predicate>
  bool wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& deadline,
                  Predicate done) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    Native native(mutex);
    return condition_.wait_until(native.lock, deadline, std::move(done));
  }

 private:
  // Lends the caller's lock to the standard library for one wait; the caller still owns it after.
  struct Native {
    explicit Native(Mutex& mutex) : lock(mutex.mutex_, std::adopt_lock) {}
    ~Native() { lock.release(); }
    std::unique_lock<std::mutex> lock;
  };
  std::condition_variable condition_;
};

}  // namespace reft
